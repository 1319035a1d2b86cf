"""Records of what rows have generated that are begun and not finished.

Each worker appends them to a file of its own beside its journal file of the shard. A record holds
the tokens since the last one of its row, with their columns, so a file has each token once. The
first record of a row in a file begins with the row's first token, also if the row went on from the
records of an earlier worker. So a file needs no other one, and the longest that any has counts.
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
from batchgen.storage.shards.row_order import KEYS
from batchgen.storage.stores.job_storage import Storage

_VERSION = {b"batchgen.begun": b"1"}
_KEY, _START, _TOKENS = "key", "start", "token_ids"


class BegunRow(NamedTuple):
    """What a sample of a row has generated from the token `start` on; `key` is the sample's."""

    row_index: int
    sample_index: int
    key: bytes
    start: int
    begun: Begun


def begun_schema(schema: OutputSchema) -> pa.Schema:
    """The schema of the records of a job with these columns."""
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
    """The columns that a row has before it has ended."""
    return [column for column in schema.columns if column.scope in ("output", "context")]


def encode_begun(schema: OutputSchema, rows: Sequence[BegunRow]) -> pa.RecordBatch:
    """The records as one Arrow batch."""
    begun = [row.begun for row in rows]
    values: dict[str, Any] = {
        KEYS[0]: [row.row_index for row in rows],
        KEYS[1]: [row.sample_index for row in rows],
        _KEY: [row.key for row in rows],
        _START: [row.start for row in rows],
        _TOKENS: id_lists([each.token_ids for each in begun]),
    }
    for name in schema.counts:
        values[name] = [each.counts.get(name, 0) for each in begun]
    for column in _columns(schema):
        values[column.name] = column_lists(column, begun)
    written = begun_schema(schema)
    arrays = [
        value if isinstance(value := values[field.name], pa.Array) else pa.array(value, field.type)
        for field in written
    ]
    return pa.RecordBatch.from_arrays(arrays, schema=written)


class _Chain(NamedTuple):
    """The records of a row by one worker, each the place of one in a batch, and how many tokens
    they have together."""

    key: bytes
    length: int
    parts: tuple[tuple[pa.RecordBatch, int], ...]


class BegunRows:
    """The records of a shard with these input rows. They stay in the files, which are
    memory-mapped."""

    def __init__(self, rows: range, retried_before: int = 0) -> None:
        """Begin without any. Rows with errors that are computed again do not go on from records of
        attempts before `retried_before`."""
        self._of_shard, self._retried_before = rows, retried_before
        self._rows: dict[tuple[int, int], dict[int, _Chain]] = {}

    def take(self, batch: pa.RecordBatch, attempt: int) -> None:
        """Take the next records of a file, whose worker has the number `attempt`. Raises
        ArrowInvalid if they are damaged."""
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
            else:
                continue
            length = start + int(lengths[index])
            chains[attempt] = _Chain(key, length, (*parts, (batch, index)))

    def longest(self, opened: OpenShard | None) -> set[int]:
        """The attempts that have the longest records of rows that are not done."""
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
        """What a sample of a row has generated, by its longest records with this key, which is
        asked for only if there are some; `retried` says whether the sample has an error and is
        computed again."""
        least = self._retried_before if retried else 0
        attempts = self._rows.get((row_index, sample), {})
        chains = [chain for attempt, chain in attempts.items() if attempt >= least]
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
    """The records of all shards of a job, in the journal. `read` gives those of a shard by all
    workers."""

    def __init__(
        self,
        schema: OutputSchema,
        journal: Journal,
        read: Callable[[int], BegunRows],
        storage: Storage,
    ) -> None:
        self._schema, self._journal, self._read, self._storage = schema, journal, read, storage
        self._rows: dict[int, BegunRows] = {}  # by shard, as far as a row was asked for

    def drop_superseded(self, complete: Collection[int], opened: Mapping[int, OpenShard]) -> None:
        """Delete the records of rows that are finished, or have longer ones by later attempts."""
        for number in sorted(self._journal.shards(BEGUN)):
            needed = set[int]()
            if number not in complete:
                needed = self._read(number).longest(opened.get(number))
            for path in self._journal.files(number, include_own=True, kind=BEGUN):
                if journal_worker(path) not in needed:
                    self._storage.delete(path)
        self._journal.refresh()

    def forget(self, number: int) -> None:
        """Read a shard anew when it is asked for again."""
        self._rows.pop(number, None)

    def drop(self, number: int) -> list[Path]:
        """Write no more of a shard; returns the files of this worker."""
        self.forget(number)
        return self._journal.release(number, BEGUN)

    def delete(self, number: int) -> None:
        """Delete what this worker has recorded of a shard, whose rows are finished."""
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
        """What was recorded of a sample of a row of an open shard; see `BegunRows.find`."""
        if (begun := self._rows.get(number)) is None:
            begun = self._rows[number] = self._read(number)
        failed = opened.is_failed(row_index, sample_index)
        return begun.find(row_index, sample_index, key, self._schema, retried=failed)

    def write(self, number: int, rows: Sequence[BegunRow]) -> None:
        """Record what rows of a shard have generated. If another worker has deleted the shard's
        files, they are finished and need no record."""
        with suppress(JournalGone):
            self._journal.append(number, encode_begun(self._schema, rows), BEGUN)


def _values(part: tuple[pa.RecordBatch, int], name: str) -> npt.NDArray[Any]:
    """The values of a list in a record, one after another."""
    batch, index = part
    values = batch.column(name).slice(index, 1).flatten()
    while pa.types.is_fixed_size_list(values.type):
        values = values.flatten()
    array: npt.NDArray[Any] = values.to_numpy(zero_copy_only=False)
    return array


def _counts(batch: pa.RecordBatch, index: int, names: Sequence[str]) -> Mapping[str, int]:
    return {name: batch.column(name)[index].as_py() for name in names}
