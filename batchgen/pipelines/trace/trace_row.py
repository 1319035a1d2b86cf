"""Traces a row of a job, of a set or of an exported file back to its sources, for `batchgen
trace`."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from batchgen.config.groups.adapter_names import ADAPTER
from batchgen.pipelines.publish.finished_rows import FinishedRows, is_set, open_rows
from batchgen.pipelines.publish.row_values import is_true
from batchgen.pipelines.publish.set_rows import SOURCE
from batchgen.pipelines.trace.exported_lines import exported_line, is_exported
from batchgen.pipelines.trace.job_traces import JobTraces
from batchgen.pipelines.trace.source_places import places_beside
from batchgen.pipelines.trace.traced import DropReason, Trace, TracedInSet
from batchgen.storage.folder.step_folders import find_record, is_pipeline
from batchgen.util.errors import ConfigError
from batchgen.util.paths import is_url, user_path

_ID = "id"
_SAMPLE = re.compile(r"(.+)#([0-9]+)", re.DOTALL)
"""The id of a set's row: the id in the job and the number of the sample."""


def trace_row(
    job_path: str,
    row_id: str | None = None,
    *,
    line: int | None = None,
    sample: int | None = None,
    of: str | None = None,
) -> Trace:
    """Trace the row with an id in a job, a pipeline or a set, or a line of an exported file.

    Args:
        job_path: the folder or file, as the user typed it.
        line: the number of a line of an exported file, from 1.
        sample: only this sample of the row.
        of: the job or set from which an exported file was made, if the file does not record it.

    Raises:
        ConfigError: the row is unknown, or a job in the chain is missing.
        JobError: a file is damaged.
    """
    trace = Trace()
    path = Path(job_path) if is_url(job_path) else user_path(job_path, "OUT")
    if is_exported(path, job_path):
        if line is None:
            raise ConfigError(f"{job_path} is an exported file: name a line of it with --line N")
        traced, origins = exported_line(path, job_path, line, of)
        trace.origins.append(traced)
        for origin in origins:
            _add(trace, origin.folder, origin.row_id, origin.sample)
        return trace
    if line is not None or of is not None:
        kind = "a folder" if is_url(job_path) or path.is_dir() else "not there"
        raise ConfigError(f"--line and --of are for exported files, and {job_path} is {kind}")
    if row_id is None:
        raise ConfigError("name the row: batchgen trace OUT ROW, or FILE --line N")
    if not is_url(job_path) and is_pipeline(job_path):
        _add_of_pipeline(trace, job_path, row_id, sample)
    else:
        _add(trace, job_path, row_id, sample)
    return trace


def _add(trace: Trace, user_path: str, row_id: str, sample: int | None) -> None:
    """Add a row of a job or set, and its sources."""
    if is_set(user_path):
        _add_of_set(trace, user_path, row_id)
    else:
        JobTraces(user_path).add(trace, row_id, sample)


def _add_of_pipeline(trace: Trace, user_path: str, row_id: str, sample: int | None) -> None:
    """Add the row from the last step that has it. If no step has it, add the reason from the last
    step that dropped it."""
    record = find_record(user_path)
    assert record is not None
    unknown: ConfigError | None = None
    dropped: Trace | None = None
    for name in [*record.current][::-1]:
        step_trace = Trace()
        try:
            JobTraces(f"{user_path.rstrip('/')}/{name}").add(step_trace, row_id, sample)
        except ConfigError as error:
            unknown = unknown or error
            continue
        if step_trace.is_there:
            trace.origins += step_trace.origins
            return
        dropped = dropped or step_trace
    if dropped is None:
        assert unknown is not None
        raise unknown
    trace.origins += dropped.origins


def _add_of_set(trace: Trace, user_path: str, row_id: str) -> None:
    rows = open_rows(user_path)
    matches: list[Mapping[str, Any]] = []
    is_grid = rows.is_grid
    for row in rows.rows(rows.columns.named(rows.columns.names)):
        if row_id in (row.variables[_ID], rows.full_id(row.variables)):
            matches.append(row.variables)
            if not is_grid:
                break
    if len(matches) > 1:
        raise _several(rows, row_id, matches)
    if not matches:
        trace.origins.append(_left_out(rows, user_path, row_id))
    for variables in matches:
        trace.origins.append(TracedInSet(user_path, variables))
        job, of_job, sample = origin_in_set(rows, variables)
        JobTraces(job).add(trace, of_job, sample)


def _several(rows: FinishedRows, row_id: str, matches: Sequence[Mapping[str, Any]]) -> ConfigError:
    """Return the error for an id that several rows of a set have, one for each adapter."""
    start = f"{rows.user_path}: {len(matches)} rows have the id {row_id}, one for each adapter: "
    if rows.grid_column is not None:
        return ConfigError(f"{start}name one of {', '.join(map(rows.full_id, matches))}")
    folder, of_job, _ = origin_in_set(rows, matches[0])
    return ConfigError(
        f"{start}the set has no column {ADAPTER!r} to tell them apart, so trace the row of the "
        f"job: batchgen trace {folder} ADAPTER/{of_job}"
    )


def origin_in_set(rows: FinishedRows, row: Mapping[str, Any]) -> tuple[str, str, int | None]:
    """Return the origin of a set's row: the folder of the job, the row id in it (see `full_id`),
    and the sample."""
    assert rows.facts is not None
    jobs = {one["path"]: one for one in rows.facts["jobs"]}
    source = row.get(SOURCE)
    if isinstance(source, dict) and source.get("job") in jobs:
        (folder,) = places_beside([source["job"]], rows.storage.path)
        adapter = row.get(rows.grid_column or "")
        start = "" if adapter is None else f"{adapter}/"
        return folder, f"{start}{source['row_id']}", source["sample_index"]
    # The data set has a column `source`, so the set has none of its own; the id names the origin.
    return _of_id(rows, rows.full_id(row))


def _of_id(rows: FinishedRows, row_id: str) -> tuple[str, str, int | None]:
    """Return the origin that the id of a set's row names, as `origin_in_set` does."""
    assert rows.facts is not None
    jobs = [one["path"] for one in rows.facts["jobs"]]
    job = jobs[0]
    if len(jobs) > 1:
        name, _, row_id = row_id.partition("/")
        paths = {path.rstrip("/").rpartition("/")[2]: path for path in jobs}
        if name not in paths:
            raise ConfigError(f"{rows.user_path}: no job of the set has the name {name}")
        job = paths[name]
    (folder,) = places_beside([job], rows.storage.path)
    if rows.facts["asked"].get("best") is None and (match := _SAMPLE.fullmatch(row_id)):
        return folder, match[1], int(match[2])
    return folder, row_id, None


def _left_out(rows: FinishedRows, user_path: str, row_id: str) -> DropReason:
    """Return which option of `select` left a row out.

    Raises:
        ConfigError: the job does not have the row either.
    """
    assert rows.facts is not None
    folder, of_job, sample = _of_id(rows, row_id)
    request = rows.facts["asked"]
    job = open_rows(folder)
    names = ["row_id", "sample_index", "error", *filter(None, [job.grid_column])]
    wanted = job.columns.named(names)
    where = None
    if request.get("where") is not None:
        where = job.columns.expression("--where", request["where"])
        wanted |= job.columns.read_by(where)
    is_there = False
    for row in job.rows(wanted):
        values = row.variables
        is_of_job = of_job in (values["row_id"], job.full_id(values))
        if not is_of_job or sample not in (None, values["sample_index"]):
            continue
        is_there = True
        if values["error"] is not None:
            return DropReason(user_path, row_id, "errors", f"{values['error']['type']} in {folder}")
        if where is not None and not is_true(where, row):
            read_values = {n: values[n] for n in where.names if n in values}
            why = ", ".join(f"{name} is {value!r:.60}" for name, value in read_values.items())
            return DropReason(user_path, row_id, f"--where {request['where']}", why)
    if not is_there:
        raise ConfigError(
            f"{user_path}: neither the set nor {folder} has a row with the id {row_id}"
        )
    options = [f"--{key} {request[key]}" for key in ("best", "dedupe", "top") if request.get(key)]
    return DropReason(
        user_path, row_id, " or ".join(options) or "select", "another row took its place"
    )
