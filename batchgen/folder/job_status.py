"""How far a job is, in one line."""

from __future__ import annotations

from typing import Any

from batchgen.folder.read_job import JobFolderReader
from batchgen.util.duration import duration


def status_line(reader: JobFolderReader, name: str) -> str:
    """How far the job is, how fast it runs and when it should end.

    The counts of a job that runs may be ten seconds old. Those of a job that was killed are counted
    where the rows lie.

    Args:
        name: of the folder, as the user gave it.
    """
    metrics = reader.metrics
    status = metrics.get("status", "not begun")
    attempt: dict[str, Any] = metrics["attempts"][-1] if metrics else {}
    rows, errors = _counts(reader, metrics)
    total = attempt.get("rows_total")
    if status == "complete" or total is None:
        facts = [f"{rows:,} rows"]
    else:
        facts = [f"{rows:,} of {total:,} rows ({rows / max(total, 1):.0%})"]
    if errors:
        facts.append(f"{errors:,} error{'s' * (errors > 1)}")
    if metrics and metrics["tokens_per_s"]:
        facts.append(f"{metrics['tokens_per_s']:,.0f} tokens/s")
    rows_per_s = _rows_per_s(metrics) if status == "running" else 0.0
    if total is not None and rows_per_s:
        facts.append(f"about {duration((total - rows) / rows_per_s, 0)} left")
    line = f"{name}: {status}, {', '.join(facts)}"
    if status in ("stopped", "killed", "failed"):
        line += "; the job's command goes on from there"
    return line


def _rows_per_s(metrics: dict[str, Any]) -> float:
    """How many rows the workers that run compute in a second, all together, as they have told."""
    attempts = metrics["attempts"]
    running = [one for one in attempts if one["status"] == "running" and one["generate_s"]]
    return sum(float(one["rows"] / one["generate_s"]) for one in running)


def _counts(reader: JobFolderReader, metrics: dict[str, Any]) -> tuple[int, int]:
    """How many rows are finished, and how many of them have an error."""
    if metrics and metrics["status"] != "killed":
        return metrics["rows"], metrics["error_rows"]
    rows = errors = 0
    if reader.schema is not None:
        for batch in reader.batches(["error"]):
            rows += batch.num_rows
            errors += batch.num_rows - batch.column("error").null_count
    return rows, errors
