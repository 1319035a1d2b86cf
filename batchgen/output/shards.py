"""Shards: Parquet files that each hold a range of input rows and are published as a whole."""

import re
from collections.abc import Iterator, Sequence
from pathlib import Path

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq

from batchgen.errors import JobError
from batchgen.output.journal import fsync_path
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
    lengths = np.array([batch.num_rows for batch in batches])
    starts = np.cumsum(lengths) - lengths
    keys = _column(batches, "row_index"), _column(batches, "sample_index")
    order = np.lexsort(keys[::-1])
    batch_of = np.repeat(np.arange(len(batches)), lengths)[order]
    row_of = order - starts[batch_of]
    sizes = _column(batches, "num_generated_tokens") * schema.token_bytes + _ROW_BYTES
    sizes += 4 * _column(batches, "num_prompt_tokens")
    group_of = np.cumsum(sizes[order]) // ROW_GROUP_BYTES
    for rows in np.split(np.arange(len(order)), np.flatnonzero(np.diff(group_of)) + 1):
        touched, local = np.unique(batch_of[rows], return_inverse=True)
        table = pa.Table.from_batches([batches[i] for i in touched], schema.arrow)
        local_starts = np.cumsum(lengths[touched]) - lengths[touched]
        yield table.combine_chunks().take(pa.array(local_starts[local] + row_of[rows]))


def _column(batches: Sequence[pa.RecordBatch], name: str) -> npt.NDArray[np.int64]:
    """An integer column of all batches together, with 0 for null."""
    column = pa.chunked_array([batch.column(name) for batch in batches])
    return np.asarray(pc.fill_null(column, 0).to_numpy(), np.int64)


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
