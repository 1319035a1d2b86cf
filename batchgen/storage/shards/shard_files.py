"""Shards: Parquet files that each hold a range of input rows and are published as a whole."""

from __future__ import annotations

import itertools
import json
import os
import re
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from batchgen.storage.leases.fsync import fsync_path
from batchgen.storage.shards.checked_file import CheckedFile, Source, damaged, seal
from batchgen.storage.shards.enough import Enough, KeptRows
from batchgen.storage.shards.row_order import KEYS, ROW_COLUMN, RowsInOrder
from batchgen.util.errors import JobError

if TYPE_CHECKING:
    from batchgen.storage.shards.output_schema import OutputSchema

ROW_GROUP_BYTES = 64 * 2**20
_ROW_BYTES = 1024  # a guess at the bytes of a row besides its tokens, to size row groups
_NAME = re.compile(r"part-([0-9]{5,})\.parquet")


def shard_path(data: Path, shard: int) -> Path:
    return data / f"part-{shard:05d}.parquet"


def shard_files(data: Path, names: Iterable[str] | None = None) -> dict[int, Path]:
    """The published shards in a data folder, in order. `names` is the content of the folder, if it
    is known."""
    sorted_names = sorted(os.listdir(data) if names is None else names)
    matches = ((_NAME.fullmatch(name), name) for name in sorted_names)
    return {int(match[1]): data / name for match, name in matches if match}


@dataclass(frozen=True)
class Extent:
    """The rows of a published shard: all samples of its first input rows.

    Attributes:
        rows: the number of input rows.
        samples: the samples of each row; with `enough` the most samples.
        enough: the rule by which a row is complete; None if each row has all `samples`.
        answers: the number of output rows; None for all `samples` of all `rows`.
    """

    rows: int
    samples: int
    enough: Enough | None = None
    answers: int | None = field(default=None, compare=False)

    @property
    def num_answers(self) -> int:
        """The number of output rows of the shard."""
        return self.rows * self.samples if self.answers is None else self.answers


@dataclass(frozen=True)
class ResumeState:
    """The state that a session's first worker found. A session is the time in which workers run
    the job together. The other workers read this state instead of all shards and journals.

    Attributes:
        extents: shard → its published rows.
        rows: the number of finished output rows.
    """

    extents: Mapping[int, Extent]
    rows: int

    def encoded(self) -> bytes:
        extents = [[n, _encoded(extent)] for n, extent in sorted(self.extents.items())]
        return json.dumps({"rows": self.rows, "extents": extents}).encode()

    @staticmethod
    def decoded(content: bytes) -> ResumeState:
        values = json.loads(content)
        return ResumeState({n: _decoded(extent) for n, extent in values["extents"]}, values["rows"])


def _encoded(extent: Extent) -> dict[str, Any]:
    figures = {"rows": extent.rows, "samples": extent.samples}
    if extent.enough is None:
        return figures
    return {**figures, "enough": extent.enough.values, "answers": extent.num_answers}


def _decoded(extent: Mapping[str, Any]) -> Extent:
    enough = None if "enough" not in extent else Enough.decoded(extent["enough"])
    return Extent(extent["rows"], extent["samples"], enough, extent.get("answers"))


def write_shard(
    batches: Sequence[pa.RecordBatch], schema: OutputSchema, path: Path, temporary: Path
) -> int:
    """Write the rows of a complete shard, sorted by (row_index, sample_index); return their number.

    The file is written and fsynced under the `temporary` name, so that it can be renamed as a
    whole. Row groups have about ROW_GROUP_BYTES; only one of them is in memory, because the batches
    are memory-mapped. The bytes of the file depend on the rows alone, not on how the batches divide
    them.
    """
    try:
        with pq.ParquetWriter(
            temporary, schema.arrow, compression="zstd", write_page_checksum=True
        ) as writer:
            rows = 0
            for group in _row_groups(batches, schema):
                writer.write_table(group, row_group_size=group.num_rows)
                rows += group.num_rows
        seal(temporary)
        fsync_path(temporary)
    except OSError as error:
        raise unwritable(path, error) from error
    return rows


def same_shard_bits(one: Source, other: Source, besides: Collection[str]) -> bool:
    """Whether two files of a shard have equal bits, except in the columns `besides`. One row group
    of each is in memory at a time."""
    with pq.ParquetFile(one) as first, pq.ParquetFile(other) as second:
        names = [name for name in first.schema_arrow.names if name not in besides]
        return first.num_row_groups == second.num_row_groups and all(
            _bits(first, group, names) == _bits(second, group, names)
            for group in range(first.num_row_groups)
        )


def _bits(file: pq.ParquetFile, group: int, names: Sequence[str]) -> Sequence[pa.Buffer]:
    columns = file.read_row_group(group, columns=names).combine_chunks()
    return [batch.serialize() for batch in columns.to_batches()]


def publish_shard(temporary: Path, path: Path) -> None:
    """Give a shard its name, which an older shard with fewer rows may have."""
    try:
        temporary.rename(path)
        fsync_path(path.parent)
    except OSError as error:
        raise unwritable(path, error) from error


def mapped_shard(path: Source, schema: OutputSchema, copy: Path) -> list[pa.RecordBatch]:
    """The rows of a published shard as memory-mapped batches of a new Arrow file `copy`."""
    try:
        with (
            CheckedFile(path) as file,
            pa.OSFile(str(copy), "wb") as sink,
            pa.ipc.new_file(sink, schema.arrow) as writer,
        ):
            for group in range(file.metadata.num_row_groups):
                # The file's own schema has the same fields and other metadata.
                writer.write_table(file.read(groups=[group]).cast(schema.arrow))
    except pa.ArrowException as error:
        raise damaged(path, str(error)) from error
    except OSError as error:
        raise unwritable(copy, error) from error
    with pa.ipc.open_file(pa.memory_map(str(copy))) as reader:
        return [reader.get_batch(i) for i in range(reader.num_record_batches)]


def _row_groups(batches: Sequence[pa.RecordBatch], schema: OutputSchema) -> Iterator[pa.Table]:
    """Yield the rows in order, in tables of about ROW_GROUP_BYTES."""
    if not batches:
        return
    rows = RowsInOrder(batches)
    kept = None if schema.enough is None else KeptRows(rows, schema.enough)
    indices = np.arange(len(rows.keys)) if kept is None else kept.indices
    sizes = rows.column("num_generated_tokens") * schema.token_bytes + _ROW_BYTES
    sizes += 4 * rows.column("num_prompt_tokens")  # the bytes of their ids
    # The row group of each row, by the bytes up to it.
    group_of = np.cumsum(sizes[indices]) // ROW_GROUP_BYTES
    begins = [0, *(np.flatnonzero(np.diff(group_of)) + 1).tolist(), len(indices)]
    for begin, end in itertools.pairwise(begins):
        group = rows.table(indices[begin:end])
        yield group if kept is None else kept.filled(group, slice(begin, end))


def shard_extent(path: Source, schema: OutputSchema, first_row: int) -> Extent:
    """Read the extent of a published shard from its footer.

    Raises:
        JobError: the file is damaged, has other columns, or does not begin at `first_row`.
    """
    with CheckedFile(path) as file:
        written, meta = file.schema, file.metadata
        last = {name: _greatest(meta, written.get_field_index(name)) for name in KEYS}
    if not written.equals(schema.arrow):
        raise damaged(path, "it has other columns than this job writes")
    if not meta.num_rows:
        return Extent(0, 0)
    rows, samples = last["row_index"] - first_row + 1, last["sample_index"] + 1
    extent, is_whole = Extent(rows, samples), rows * samples == meta.num_rows
    if schema.enough is not None:
        if (by := Enough.of(written.metadata)) is None:
            raise damaged(path, "it does not say when its rows have enough samples")
        extent = Extent(rows, by.most, by, meta.num_rows)
        is_whole = samples <= by.most and rows <= meta.num_rows <= rows * by.most
    if not is_whole:
        raise damaged(path, f"{meta.num_rows} rows, which is impossible")
    return extent


def last_row(file: CheckedFile) -> int:
    """The greatest `row_index` in a shard; -1 if it has no rows."""
    return _greatest(file.metadata, file.schema.get_field_index(ROW_COLUMN))


def _greatest(meta: pq.FileMetaData, column: int) -> int:
    """The greatest value of a column of integers; -1 if it has no values."""
    groups = (meta.row_group(i) for i in range(meta.num_row_groups))
    chunks = (group.column(column) for group in groups if group.num_rows and column >= 0)
    return max((chunk.statistics.max for chunk in chunks if chunk.is_stats_set), default=-1)


def read_columns(path: Source, columns: Sequence[str]) -> pa.Table:
    """Read some columns of a published shard, in this order.

    Raises:
        JobError: the shard is damaged.
    """
    with CheckedFile(path) as file:
        table = file.read(columns)
    try:
        return table.select(columns)
    except KeyError as error:
        raise damaged(path, f"it has no column {error}") from error


def unwritable(path: Path, error: OSError) -> JobError:
    """The error for a shard that cannot be written."""
    return JobError(f"cannot write {path}: {error.strerror or error}")
