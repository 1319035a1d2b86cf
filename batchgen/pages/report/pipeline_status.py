"""What `batchgen status` prints for the folder of a pipeline: how many rows each step has read and
kept (the *funnel*), and which workers run."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict
from typing import Any

from batchgen.pages.report.funnel import StepCounts, funnel, funnel_table
from batchgen.storage.folder.job_summary import status_line
from batchgen.storage.folder.open_folder import open_job_reader
from batchgen.storage.folder.step_folders import find_record
from batchgen.storage.folder.worker_status import Status, read_status
from batchgen.util.errors import ConfigError

_STALE_AFTER = 60.0
"""Seconds without a heartbeat after which a worker counts as dead, if config.yaml does not say."""


def pipeline_counts(out: str) -> list[StepCounts]:
    """Return the counts of the current steps of the pipeline in a folder, a path or URL."""
    record = find_record(out)
    return [] if record is None else funnel(out, record.current)


def status_text(out: str, steps: Sequence[StepCounts]) -> Iterator[str]:
    """Yield the funnel of `pipeline_counts` as a table, and a line for each step that is damaged,
    or has begun and is not complete."""
    yield funnel_table(steps)
    for step in steps:
        if step.damage is not None:
            yield f"step {step.name} is damaged: {step.damage}"
        elif step.is_begun and step.state != "complete":
            yield status_line(open_job_reader(f"{out}/{step.folder}"), step.name)


def statuses(out: str, steps: Sequence[StepCounts]) -> Mapping[str, Status]:
    """Return the workers of each step that has begun and is not damaged, by the step's name."""
    result = {}
    for step in steps:
        if step.damage is not None:
            continue
        try:
            reader = open_job_reader(f"{out}/{step.folder}")
        except ConfigError:  # it has not begun
            continue
        stale_after = reader.config.get("workers", {}).get("stale_after", _STALE_AFTER)
        result[step.name] = read_status(reader.storage, stale_after)
    return result


def summary(out: str, steps: Sequence[StepCounts]) -> dict[str, Any]:
    """Return the counts and the workers of each step as plain values for JSON, by the step's
    name."""
    workers = statuses(out, steps)
    return {
        step.name: {
            **asdict(step),
            "read": step.read,
            "rows": step.rows,
            "kept": step.kept,
            "status": asdict(workers[step.name]) if step.name in workers else None,
        }
        for step in steps
    }
