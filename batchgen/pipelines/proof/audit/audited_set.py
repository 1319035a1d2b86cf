"""Audits rows of a set that `batchgen select` wrote, with the facts about its jobs that the set
keeps. `audited_folder` calls it."""

from __future__ import annotations

import tempfile
from collections.abc import Sequence
from contextlib import closing
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from batchgen.config.groups.job_config import JobConfig
from batchgen.jobs.resolve.resolved_job import ResolvedJob
from batchgen.pipelines.proof.audit.audited_job import AuditedRow, open_parts
from batchgen.pipelines.proof.audit.drawn_rows import drawn_rows
from batchgen.pipelines.proof.audit.first_difference import first_difference
from batchgen.pipelines.proof.audit.rows_again import compute_again
from batchgen.pipelines.publish.finished_rows import FinishedRows
from batchgen.pipelines.publish.set_rows import SOURCE
from batchgen.pipelines.trace.trace_row import origin_in_set
from batchgen.storage.shards.row_order import SAMPLE_COLUMN
from batchgen.storage.stores.manifest import Manifest
from batchgen.util.errors import ConfigError

_ID = "id"
_GROUPS = ("output", "engine")
"""Groups of the configuration that a set keeps in each job's manifest, and not in its copy of the
configuration."""


class SetRow(NamedTuple):
    """A row of a set.

    Attributes:
        id: its id in the set.
        job, row_id, sample: its origin: the folder of a job, and a row and a sample of it. The
            sample is None if the set has one sample of each row and does not say which.
        stored: its columns, a table of one row.
    """

    id: str
    job: str
    row_id: str
    sample: int | None
    stored: pa.Table


def chosen_rows_of_set(rows: FinishedRows, count: int, seed: int) -> list[SetRow]:
    """Rows of a set, drawn at random without repetition."""
    indices = drawn_rows(rows.total, count, seed)
    chosen = []
    for number, shard in enumerate(rows.shards):
        num_rows = shard.ends[-1]  # where the last of the shard's row groups ends
        stop = shard.first + num_rows
        here = [index - shard.first for index in indices if shard.first <= index < stop]
        if not here:
            continue
        for table, _ in rows.tables(number, rows.schema.names, indices=np.array(here)):
            for at in range(table.num_rows):
                row = table.slice(at, 1)
                names = [name for name in (_ID, SOURCE) if name in row.schema.names]
                (values,) = row.select(names).to_pylist()
                job, row_id, sample = origin_in_set(rows, values)
                chosen.append(SetRow(values[_ID], job, row_id, sample, row))
    return chosen


def job_of_set(rows: FinishedRows, folder: str) -> tuple[dict[str, Any], Manifest]:
    """The configuration of a job by group, as far as it decides rows, and its manifest. Both come
    from the set.

    Raises:
        ConfigError: the set does not hold enough.
    """
    assert rows.facts is not None
    jobs = {Path(job["path"]).name: job for job in rows.facts["jobs"]}
    entry = jobs.get(Path(folder).name)
    if entry is None or not isinstance(entry.get("config"), dict):
        raise ConfigError(
            f"{rows.user_path} does not say how the rows of {folder} were made: audit that job"
        )
    manifest = entry["manifest"]
    groups = {**entry["config"], **{name: manifest["identity"][name] for name in _GROUPS}}
    # A configuration must have output.dir, which a set does not keep. Nothing is written there.
    return {**groups, "output": {**groups["output"], "dir": "."}}, Manifest(**manifest)


def audit_set_rows(
    config: JobConfig, manifest: Manifest, rows: Sequence[SetRow], user_path: str, text_as: str
) -> list[AuditedRow]:
    """Compute rows of one job again, and compare them with the set's columns. `text_as` is the
    set's name of the text column."""
    with closing(open_parts(config, manifest, user_path)) as parts:
        runs = len(config.model.adapters) if config.model.lora_grid else 1
        numbers = _numbers(parts, {row.row_id for row in rows}, runs)
        with tempfile.TemporaryDirectory(prefix="batchgen-audit-") as folder:
            again = compute_again(config, parts, numbers, Path(folder), None)
    again = again.select([name for name in again.schema.names if name not in parts.by_schedule])
    text, grid = config.output.text_column, config.model.grid_column
    return [_audited(row, _of_row(row, again, grid), text, text_as) for row in rows]


def _numbers(parts: ResolvedJob, ids: set[str], runs: int) -> Sequence[int]:
    """The numbers, ascending, of the rows with these ids. Each id occurs `runs` times, once for
    each adapter with which a row runs (`model.lora_grid`)."""
    source = parts.source
    source.find_index(None)  # a temporary row index, because a set has none
    numbers, missing = list[int](), set(ids)
    for row in source.rows():
        if row.id in ids:
            numbers.append(row.index)
            missing.discard(row.id)
            if len(numbers) == runs * len(ids):
                return numbers
    raise ConfigError(f"dataset: it has no row with the id {min(missing)}, which the set has")


def _of_row(row: SetRow, again: pa.Table, grid: str | None) -> pa.Table:
    """The recomputed samples of a row: of its adapter, if `grid` is a column of the set that names
    it, else of all."""
    computed = again.filter(pc.equal(again["row_id"], row.row_id))
    if grid is None or grid not in row.stored.schema.names:
        return computed
    return computed.filter(pc.equal(computed[grid], row.stored[grid][0]))


def _audited(row: SetRow, computed: pa.Table, text: str, text_as: str) -> AuditedRow:
    """Compare a row with its recomputed samples."""
    if text_as != text and text_as not in computed.schema.names:
        computed = computed.append_column(text_as, computed[text])
    left_out = {_ID, *(() if _is_copied(computed, row.stored) else (SOURCE,))}
    names = [name for name in row.stored.schema.names if name in computed.schema.names]
    names = [name for name in names if name not in left_out]
    difference: str | None = "the recomputed row has no such sample"
    for at in range(computed.num_rows):
        sample = computed.slice(at, 1)
        # If the set does not say which sample or which adapter it has, it may be any.
        if row.sample in (None, sample[SAMPLE_COLUMN][0].as_py()):
            difference = first_difference(sample, row.stored, names)
            if difference is None:
                break
    return AuditedRow(row.id, samples=1, difference=difference)


def _is_copied(expected: pa.Table, stored: pa.Table) -> bool:
    """Whether the column `source` of a set was copied from the job."""
    return all(SOURCE in t.schema.names for t in (expected, stored)) and (
        expected.schema.field(SOURCE).type == stored.schema.field(SOURCE).type
    )
