"""Records of *begun* rows: the tokens that unfinished rows have generated so far.

After a kill the job continues such rows from their records instead of generating them again. Each
worker appends records to a file next to its journal file of the shard (`journal.py`). A record
holds the tokens since the previous record of the same row, with their columns. The first record of
a row in a file always begins with the row's first token, even if the row was continued from another
worker's records. So each file can be read alone. If several files have records of a row, the one
with the most tokens counts.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from batchgen.engine.interface.outputs import Begun, OutputColumn
from batchgen.storage.leases.lease_files import BEGUN
from batchgen.storage.shards.journal import Journal, JournalGone, journal_worker
from batchgen.storage.shards.open_shard import OpenShard
from batchgen.storage.shards.output_schema import OutputSchema, column_lists, id_lists
from batchgen.storage.shards.row_order import KEYS, ROW_COLUMN, SAMPLE_COLUMN
from batchgen.storage.stores.job_storage import Storage

_VERSION = {b"batchgen.begun": b"1"}
_KEY, _START, _TOKENS = "key", "start", "token_ids"


class BegunRow(NamedTuple):
    """One record of a sample of a row.

    Attributes:
        row_index, sample_index: the sample.
        key: a digest of the sample's request, so that a changed request does not continue from it.
        start: the index of the record's first token in the answer.
        begun: the tokens and their columns.
    """

    row_index: int
    sample_index: int
    key: bytes
    start: int
    begun: Begun


def begun_schema(schema: OutputSchema) -> pa.Schema:
    """The Arrow schema of the records of a job whose output has this schema."""
    fields = [
        *(schema.arrow.field(name).remove_metadata() for name in KEYS),
        pa.field(_KEY, pa.binary()),
        pa.field(_START, pa.int32()),
        pa.field(_TOKENS, pa.list_(pa.int32())),
    ]
    names = [*schema.counts, *(column.name for column in _columns(schema))]
    values = [schema.arrow.field(name).remove_metadata() for name in names]
    return pa.schema([*fields, *values], metadata=_VERSION)


def _columns(schema: OutputSchema) -> list[OutputColumn]:
    """The columns that a row has before it ends."""
    return [column for column in schema.columns if column.scope in ("output", "context")]


def encode_begun(schema: OutputSchema, rows: Sequence[BegunRow]) -> pa.RecordBatch:
    """The records as one Arrow batch."""
    begun = [row.begun for row in rows]
    values: dict[str, Any] = {
        ROW_COLUMN: [row.row_index for row in rows],
        SAMPLE_COLUMN: [row.sample_index for row in rows],
        _KEY: [row.key for row in rows],
        _START: [row.start for row in rows],
        _TOKENS: id_lists([record.token_ids for record in begun]),
    }
    for name in schema.counts:
        values[name] = [record.counts.get(name, 0) for record in begun]
    for column in _columns(schema):
        values[column.name] = column_lists(column, begun)
    written = begun_schema(schema)
    arrays = [
        value if isinstance(value := values[field.name], pa.Array) else pa.array(value, field.type)
        for field in written
    ]
    return pa.RecordBatch.from_arrays(arrays, schema=written)


class _Chain(NamedTuple):
    """The records that one worker wrote of a row.

    Attributes:
        key: the digest of the request.
        length: the number of tokens in all records.
        parts: for each record, its batch and its index in it.
    """

    key: bytes
    length: int
    parts: tuple[tuple[pa.RecordBatch, int], ...]


class BegunRows:
    """The records of one shard. Their values stay in the files, which are memory-mapped."""

    def __init__(self, rows: range, retried_before: int = 0) -> None:
        """Create without records.

        Args:
            rows: the input rows of the shard.
            retried_before: a row that had an error and is computed again does not continue from
                records of attempts before this one.
        """
        self._of_shard, self._retried_before = rows, retried_before
        self._rows: dict[tuple[int, int], dict[int, _Chain]] = {}

    def take(self, batch: pa.RecordBatch, attempt: int) -> None:
        """Add the next records of a file of the worker `attempt`.

        Raises:
            ArrowInvalid: the records are damaged.
        """
        batch.validate(full=True)
        heads = [batch.column(name).to_pylist() for name in (*KEYS, _KEY, _START)]
        lengths = np.diff(batch.column(_TOKENS).offsets.to_numpy())
        for index, (row, sample, key, start) in enumerate(zip(*heads, strict=True)):
            if row not in self._of_shard:
                continue
            chains = self._rows.setdefault((row, sample), {})
            before = chains.get(attempt)
            if start == 0:
                parts: tuple[tuple[pa.RecordBatch, int], ...] = ()
            elif before is not None and (before.key, before.length) == (key, start):
                parts = before.parts
            else:  # the record before is missing, or is of another request
                continue
            length = start + int(lengths[index])
            chains[attempt] = _Chain(key, length, (*parts, (batch, index)))

    def __contains__(self, sample: tuple[int, int]) -> bool:
        """Whether there are records of a sample: (index of the row, index of the sample)."""
        return sample in self._rows

    def longest(self, opened: OpenShard | None) -> set[int]:
        """The attempts whose files hold the longest records of some unfinished row. `opened` says
        which rows are unfinished; None: all."""
        numbers = set()
        for (row, sample), chains in self._rows.items():
            if chains and (opened is None or sample in opened.missing(row)):
                numbers.add(max(chains, key=lambda attempt: (chains[attempt].length, attempt)))
        return numbers

    def find(
        self,
        row_index: int,
        sample: int,
        key: Callable[[], bytes],
        schema: OutputSchema,
        *,
        retried: bool,
    ) -> Begun | None:
        """The tokens that a sample of a row has generated so far: its longest records with the same
        key.

        Args:
            key: returns the key of the sample's request; called only if there are records.
            retried: whether the sample had an error and is computed again.

        Returns:
            None if there are no such records.
        """
        first_attempt = self._retried_before if retried else 0
        attempts = self._rows.get((row_index, sample), {})
        chains = [chain for attempt, chain in attempts.items() if attempt >= first_attempt]
        chains = [chain for chain in chains if chain.key == key()]
        if not chains:
            return None
        parts = max(chains, key=lambda chain: chain.length).parts
        last, index = parts[-1]
        return Begun(
            np.concatenate([_values(part, _TOKENS) for part in parts]).tolist(),
            {
                column.name: np.concatenate([_values(part, column.name) for part in parts])
                .reshape(-1, *column.tail_shape)
                .astype(column.dtype, copy=False)
                for column in _columns(schema)
            },
            _counts(last, index, schema.counts),
        )


class BegunRecords:
    """Reads and writes the records of all shards of a job."""

    def __init__(
        self,
        schema: OutputSchema,
        journal: Journal,
        read: Callable[[int], BegunRows],
        storage: Storage,
    ) -> None:
        """Keep records next to the files of a journal. `read` returns the records of a shard by all
        workers."""
        self._schema, self._journal, self._read, self._storage = schema, journal, read, storage
        self._rows: dict[int, BegunRows] = {}  # shard → its records, once they were read

    def drop_superseded(self, complete: Collection[int], opened: Mapping[int, OpenShard]) -> None:
        """Delete the files whose rows are all finished, or have longer records by other
        attempts."""
        for number in sorted(self._journal.shards(BEGUN)):
            needed = set[int]()
            if number not in complete:
                needed = self._read(number).longest(opened.get(number))
            for path in self._journal.files(number, include_own=True, kind=BEGUN):
                if journal_worker(path) not in needed:
                    self._storage.delete(path)
        self._journal.refresh()

    def forget(self, number: int) -> None:
        """Forget the records of a shard, so that they are read again when needed."""
        self._rows.pop(number, None)

    def drop(self, number: int) -> list[Path]:
        """Stop to write records of a shard; return this worker's files of it."""
        self.forget(number)
        return self._journal.release(number, BEGUN)

    def delete(self, number: int) -> None:
        """Delete this worker's records of a shard whose rows are finished."""
        for path in self.drop(number):
            self._storage.delete(path)

    def find(
        self,
        number: int,
        opened: OpenShard,
        row_index: int,
        sample_index: int,
        key: Callable[[], bytes],
    ) -> Begun | None:
        """The recorded tokens of a sample in an open shard; see `BegunRows.find`."""
        if (begun := self._rows.get(number)) is None:
            begun = self._rows[number] = self._read(number)
        if (row_index, sample_index) not in begun:
            return None
        failed = opened.is_failed(row_index, sample_index)
        return begun.find(row_index, sample_index, key, self._schema, retried=failed)

    def write(self, number: int, rows: Sequence[BegunRow]) -> None:
        """Append records of rows of a shard. If another worker has deleted the shard's files, its
        rows are finished, and nothing is written."""
        with suppress(JournalGone):
            self._journal.append(number, encode_begun(self._schema, rows), BEGUN)


def _values(part: tuple[pa.RecordBatch, int], name: str) -> npt.NDArray[Any]:
    """The values of a list in a record, flattened."""
    batch, index = part
    values = batch.column(name).slice(index, 1).flatten()
    while pa.types.is_fixed_size_list(values.type):
        values = values.flatten()
    array: npt.NDArray[Any] = values.to_numpy(zero_copy_only=False)
    return array


def _counts(batch: pa.RecordBatch, index: int, names: Sequence[str]) -> Mapping[str, int]:
    return {name: batch.column(name)[index].as_py() for name in names}
