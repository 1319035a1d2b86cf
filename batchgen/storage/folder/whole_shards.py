"""Checks that a job's folder still has all rows that were written into it.

Every reader of a job calls `check_job` first (see `open_folder.py`), so that a lost or damaged
shard is an error and never a smaller result.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import pyarrow as pa

from batchgen.storage.folder.row_funnel import IndexFacts
from batchgen.storage.leases.lease_files import DATA, JOURNAL
from batchgen.storage.shards.checked_file import CheckedFile, damaged
from batchgen.storage.shards.row_order import ROW_COLUMN, SAMPLE_COLUMN
from batchgen.storage.shards.shard_files import shard_files, shard_path
from batchgen.storage.stores.folder_storage import names_in
from batchgen.storage.stores.job_storage import Storage
from batchgen.storage.stores.manifest import ROWS, SAMPLES, UNTIL_MOST, runs_of_row
from batchgen.util.errors import ConfigError, JobError

_TYPES = {
    "row_id": pa.string(),
    ROW_COLUMN: pa.int64(),
    SAMPLE_COLUMN: pa.int32(),
    "finish_reason": pa.string(),
}
"""The types of the columns that every row of a job has, besides its text."""


@dataclass(frozen=True)
class FinishedShard:
    """A shard as it was when its folder was opened.

    Attributes:
        first: the number of rows in the shards before it.
        ends: for each of its row groups, the number of the shard's rows up to the end of the group.
        digest: a digest of the file's content; None if computing it would take a read of the whole
            file, as for files of older versions.
    """

    first: int
    ends: tuple[int, ...]
    digest: str | None


@dataclass(frozen=True)
class WholeShards:
    """The shards of a folder by their number, and the columns of their rows."""

    shards: list[FinishedShard]
    schema: pa.Schema

    @property
    def total(self) -> int:
        """The number of rows, samples and errors included."""
        return self.shards[-1].first + self.shards[-1].ends[-1]


def whole_shards(
    storage: Storage, user_path: str, rows: object, said_by: str = "metrics.json"
) -> WholeShards:
    """Read the footers of all shards of a complete job, or of a published set.

    The data before a footer are checked when they are read.

    Args:
        user_path: the folder, as the user typed it.
        rows: the number of rows that the folder's file `said_by` states; None if no file states it.

    Raises:
        ConfigError: there are no shards.
        JobError: a shard is missing or damaged, or has other rows than it should.
    """
    numbers = shard_numbers(storage, user_path, None)
    shards, schema, first = list[FinishedShard](), pa.schema([]), 0
    for number in numbers:
        source = storage.parquet(shard_path(storage.path / DATA, number))
        with CheckedFile(source) as file:
            schema = schema if number else file.schema
            if not file.schema.equals(schema):
                raise damaged(source, "it has other columns than the shards before it")
            shards.append(FinishedShard(first, ends_of(file), file.known_digest()))
        first += shards[-1].ends[-1]
    if rows is not None and rows != first:
        raise JobError(
            f"{user_path}: its shards hold {first:,} rows, and {said_by} says {rows}: shards are "
            "missing or belong to another job; run its command again, which computes what is "
            "missing"
        )
    return WholeShards(shards, schema)


def shard_numbers(storage: Storage, user_path: str, count: int | None) -> list[int]:
    """The numbers of the shards in a folder. `count` is the number of shards that it must have;
    None if that is not known.

    Raises:
        ConfigError: there are no shards.
        JobError: shards are missing.
    """
    numbers = list(shard_files(storage.path / DATA, names_in(storage, DATA)))
    if not numbers:
        raise ConfigError(f"{user_path} has no rows: there are no shards in data/")
    count = max(len(numbers), numbers[-1] + 1) if count is None else count
    if numbers == list(range(count)):
        return numbers
    missing = sorted(set(range(count)) - set(numbers))
    listed = ", ".join(map(str, missing[:10])) + (" …" if len(missing) > 10 else "")
    lost = f"of {count:,} shards {listed} {'is' if len(missing) == 1 else 'are'} missing in data/"
    if not missing:
        lost = f"data/ has {len(numbers):,} shards, and {count:,} are the job's"
    raise JobError(
        f"{user_path}: {lost}: run its command again, which computes them, or copy them back "
        "into the folder"
    )


def check_job(
    storage: Storage, user_path: str, manifest: Mapping[str, Any], metrics: Mapping[str, Any],
    facts: IndexFacts | None,
) -> WholeShards | None:  # fmt: skip
    """Check the shards of a job whose metrics.json says complete, and return them; None for another
    job.

    A published copy may lack metrics.json; then the manifest says how many rows there must be. In
    an object store, where files appear whole, only the names of the shards are checked, because
    reading a footer is a request.

    Args:
        facts: the content of rows.json; None without row steps.

    Raises:
        ConfigError, JobError: see `whole_shards`.
    """
    is_copy = not metrics and not storage.exists(storage.path / JOURNAL)
    if metrics.get("status") != "complete" and not is_copy:
        return None
    growing, identity = manifest["growing"], manifest["identity"]
    output, samples = identity["output"], growing.get(SAMPLES)
    rows = None if "rows" in identity else growing.get(ROWS)  # row steps leave fewer rows
    rows = rows if facts is None else facts.rows
    rows = None if rows is None else int(rows) * runs_of_row(manifest)
    # Rounded up; a job without rows has one empty shard.
    count = None if rows is None else max(1, -(-int(rows) // int(output["rows_per_shard"])))
    shard_numbers(storage, user_path, count)
    if not storage.in_place:
        return None
    answers = metrics.get("rows", 0)
    if is_copy:
        answers = None
        if rows is not None and samples is not None and UNTIL_MOST not in growing:
            answers = int(rows) * int(samples)
    whole = whole_shards(
        storage, user_path, answers, "manifest.json" if is_copy else "metrics.json"
    )
    check_job_columns(storage, whole.schema, output["text_column"])
    return whole


def check_job_columns(storage: Storage, schema: pa.Schema, text_column: str) -> None:
    """Check that the rows of a job have the columns that all jobs write.

    Raises:
        DamagedFile: a column is missing or has another type.
    """
    for name, kind in {**_TYPES, text_column: pa.string()}.items():
        if name not in schema.names or schema.field(name).type != kind:
            source = storage.parquet(shard_path(storage.path / DATA, 0))
            raise damaged(source, f"it has no column {name} of {kind}")


def ends_of(file: CheckedFile) -> tuple[int, ...]:
    """For each row group of a shard, the number of rows up to its end."""
    meta = file.metadata
    sizes = [meta.row_group(group).num_rows for group in range(meta.num_row_groups)]
    return tuple(np.cumsum(sizes).tolist()) or (0,)  # an empty shard has no row groups
