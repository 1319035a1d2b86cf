"""The verb `batchgen status OUT`: shows a job's progress, what its workers do, how fast they are,
and when the job will end."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import asdict
from typing import TYPE_CHECKING

from batchgen.cli.verb_table import VerbParser
from batchgen.storage.folder.worker_status import Status, WorkerState, read_status
from batchgen.util.duration import duration
from batchgen.util.paths import user_folder
from batchgen.util.text.text_table import columns

if TYPE_CHECKING:
    from batchgen.storage.folder.read_job import JobFolderReader

_ABOUT = """\
Show how far a job is and what each of its workers does, without changing anything. For a
pipeline's folder, show every step with the rows it had and kept.

A worker is any process that runs the job's command with the same output.dir. A silent worker has
not reported for workers.stale_after seconds; others take over what it has begun."""


def main(arguments: Sequence[str]) -> int:
    """Run the verb, and return its exit code. Raises ConfigError if there is no job in the
    folder."""
    parser = VerbParser("status", _ABOUT)
    parser.add_argument("out", metavar="OUT", help="the job's output.dir, or a pipeline's")
    parser.add_argument("--json", action="store_true", help="print everything, as JSON")
    args = parser.parse_args(arguments)
    from batchgen.storage.folder.job_summary import JobSummary, status_line
    from batchgen.storage.folder.open_folder import open_job_reader
    from batchgen.storage.folder.step_folders import is_pipeline

    out = user_folder(args.out, "OUT")
    if is_pipeline(out):
        return _of_pipeline(out, as_json=args.json)
    reader = open_job_reader(args.out)
    stale_after = reader.config.get("workers", {}).get("stale_after", 60)
    status = read_status(reader.storage, stale_after)
    if args.json:
        print(json.dumps(asdict(status), indent=2, ensure_ascii=False))
        return 0
    print(status_line(reader, args.out))
    if (facts := reader.row_facts) is not None:
        print(f"steps of rows: {facts.funnel}")
    summary = JobSummary.of(reader.metrics, reader.config, name=args.out)
    if (cost := summary.cost) is not None:
        print(f"device: {cost}")
    if (budget := reader.metrics.get("budget")) is not None:
        from batchgen.jobs.generation.spending import shown_facts

        print(f"budget: {shown_facts(budget)}")
    for line in lines(status, _num_shards(reader)):
        print(line)
    return 0


def _of_pipeline(out: str, *, as_json: bool) -> int:
    """Print the progress of each step of a pipeline, and what its workers do. Returns the exit
    code, 1 if a step is damaged."""
    from batchgen.pages.report.pipeline_status import (
        pipeline_counts,
        status_text,
        statuses,
        summary,
    )

    steps = pipeline_counts(out)
    is_damaged = any(step.damage is not None for step in steps)
    if as_json:
        print(json.dumps(summary(out, steps), indent=2, ensure_ascii=False))
        return int(is_damaged)
    for line in status_text(out, steps):
        print(line)
    for name, status in statuses(out, steps).items():
        if status.workers:
            print(f"\nworkers of step {name}:")
            print("\n".join(lines(status, None)))
    return int(is_damaged)


def lines(status: Status, num_shards: int | None) -> list[str]:
    """Return the lines about workers and shards.

    Args:
        num_shards: the number of shards of the whole job; None if unknown.
    """
    if not status.workers:
        return []
    header = ("worker", "name", "state", "shards", "rows", "tokens/s", "heard of", "where")
    table = columns([header, *map(_facts, status.workers)], numbers=False)
    of_total = "" if num_shards is None else f" of {num_shards:,} in all"
    table.append(f"shards: {status.begun:,} begun, {status.done:,} done by these workers{of_total}")
    for shard, ended in status.quarantined.items():
        who = ", ".join(map(str, ended))
        table.append(f"shard {shard} is in quarantine: it crashed the workers {who}")
    return table


def _facts(worker: WorkerState) -> tuple[str, ...]:
    """Return a worker's cells of the table."""
    attempt, beat = worker.attempt, worker.beat
    shards = [str(shard) for shard in worker.shards] + [f"copy of {s}" for s in worker.backups]
    shard_text = ", ".join(shards[:4]) + (" …" if len(shards) > 4 else "")
    # A worker records its engine's memory once the engine is built. Until then it loads the model.
    loading = worker.state == "running" and not attempt.get("memory")
    return (
        str(beat["worker"]),
        worker.name,
        "loading" if loading else worker.state,
        shard_text or "–",
        f"{attempt.get('rows', 0):,}",
        f"{worker.tokens_per_s:,.0f}",
        f"{duration(worker.silent, 0)} ago",
        f"{beat['host']}, process {beat['pid']}",
    )


def _num_shards(reader: JobFolderReader) -> int | None:
    """Return the number of shards that the complete job will have; None if unknown."""
    from batchgen.storage.folder.job_summary import JobSummary

    config = reader.config
    total = JobSummary.of(reader.metrics).rows_total
    if total is None or not config:
        return None
    # `total` counts samples. A shard has the samples of `rows_per_shard` input rows.
    return int(-(-total // (config["output"]["rows_per_shard"] * config["sampling"]["n"])))
