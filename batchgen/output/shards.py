"""Shards: Parquet files that each hold a range of input rows and are published as a whole."""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from batchgen.errors import JobError
from batchgen.output.journal import fsync_path
from batchgen.output.row_order import RowsInOrder

if TYPE_CHECKING:
    from batchgen.output.schema import OutputSchema

ROW_GROUP_BYTES = 64 * 2**20
_ROW_BYTES = 1024  # a guess at what a row takes besides its tokens, to size row groups
_NAME = re.compile(r"part-(\d{5,})\.parquet")


def shard_path(data: Path, shard: int) -> Path:
    return data / f"part-{shard:05d}.parquet"


def shard_files(data: Path) -> dict[int, Path]:
    """The published shards of a data folder, in order."""
    found = ((_NAME.fullmatch(path.name), path) for path in sorted(data.iterdir()))
    return {int(match[1]): path for match, path in found if match}


def publish_shard(
    batches: Sequence[pa.RecordBatch], schema: OutputSchema, path: Path, temporary: Path
) -> None:
    """Write the rows of a complete shard, sorted by (row_index, sample_index).

    The file is written under another name, fsynced and renamed, so that it is whole whenever it is
    there. It has row groups of about ROW_GROUP_BYTES, and one of them at a time is in memory,
    because the batches are memory-mapped. Its bytes depend on the rows alone, not on how these are
    spread over the batches.

    Args:
        temporary: the other name, on the same file system.

    Raises:
        JobError: the file cannot be written.
    """
    try:
        with pq.ParquetWriter(
            temporary, schema.arrow, compression="zstd", write_page_checksum=True
        ) as writer:
            for group in _row_groups(batches, schema):
                writer.write_table(group, row_group_size=group.num_rows)
        fsync_path(temporary)
        temporary.rename(path)
    except OSError as error:
        raise JobError(f"cannot write {path}: {error.strerror or error}") from error
    fsync_path(path.parent)


def _row_groups(batches: Sequence[pa.RecordBatch], schema: OutputSchema) -> Iterator[pa.Table]:
    if not batches:
        return
    rows = RowsInOrder(batches)
    sizes = rows.column("num_generated_tokens") * schema.token_bytes + _ROW_BYTES
    sizes += 4 * rows.column("num_prompt_tokens")
    group_of = np.cumsum(sizes) // ROW_GROUP_BYTES
    for group in np.split(np.arange(len(group_of)), np.flatnonzero(np.diff(group_of)) + 1):
        yield rows.table(group)


def shard_num_rows(path: Path, schema: OutputSchema) -> int:
    """How many output rows a published shard has, as its footer says.

    Raises:
        JobError: the file is damaged or has other columns than this job writes.
    """
    try:
        with pq.ParquetFile(path) as file:
            written = file.schema_arrow
            rows = int(file.metadata.num_rows)
    except (pa.ArrowInvalid, OSError) as error:
        raise damaged(path, str(error)) from error
    if not written.equals(schema.arrow):
        raise damaged(path, "it has other columns than this job writes")
    return rows


def damaged(path: Path, why: str) -> JobError:
    """The error for a published shard that cannot be used."""
    return JobError(
        f"the published shard {path} is damaged ({why}): delete it and run the same command, "
        "which computes its rows again"
    )
