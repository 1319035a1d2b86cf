"""Runs a job: writes every row of the data set into the output folder exactly once.

This is the top of the package: the command, `batchgen.run_job` and pipelines call `execute_job`.
"""

from __future__ import annotations

from contextlib import ExitStack, closing
from dataclasses import replace
from functools import partial

from batchgen.config.groups.job_config import JobConfig
from batchgen.evals.grades.grading_queue import GradingQueue
from batchgen.evals.scores.samples import Samples
from batchgen.jobs.generation.shard_queue import ShardQueue
from batchgen.jobs.generation.turns import Turns, alone, between
from batchgen.jobs.generation.worker import Worker
from batchgen.jobs.resolve.resolved_job import ResolvedJob
from batchgen.jobs.run.checked_rows import CheckedRows, check_rows, job_manifest, pin_values
from batchgen.jobs.run.computed_rows import compute_rows
from batchgen.jobs.run.graded_job import grade_and_score
from batchgen.jobs.run.job_attempt import JobAttempt, how_to_resume
from batchgen.jobs.run.job_end import JobResult, already_complete, complete, completed_elsewhere
from batchgen.jobs.run.join_folder import open_job_folder, worker_in, writer_in
from batchgen.jobs.trackers.trackers import Trackers
from batchgen.pages.report.write_report import REPORT
from batchgen.storage.folder.dataset_card import unfinished_card
from batchgen.storage.folder.job_folder import JobFolder
from batchgen.storage.leases.file_store import FolderGone
from batchgen.storage.leases.lease_files import GRADING
from batchgen.storage.stores.open_storage import open_storage
from batchgen.util.errors import JobError, OpenedAnew
from batchgen.util.signals import JobStopped, StopSignals

_JOIN_TRIES = 5  # the most times that another process may open the job at the same moment


def execute_job(config: JobConfig, parts: ResolvedJob) -> JobResult:
    """Run a job to its end, or resume a job that was stopped or killed.

    Everything that can be refused is refused before the weights load. A first SIGINT or SIGTERM
    stops the job cleanly, a second one at once.

    Raises:
        ConfigError: the user made a mistake. No row was computed, unless the mistake is in a later
            row of the data set.
        JobError: the output cannot be written or is damaged. Finished rows are safe.
        Exception: an error of the engine or the data set. Finished rows are safe.
    """
    with StopSignals() as signals, closing(parts):
        return alone(job_turns(config, parts, signals))


def job_turns(config: JobConfig, parts: ResolvedJob, signals: StopSignals) -> Turns[JobResult]:
    """The turns of `execute_job`, until `signals` say when to stop.

    Everything that can be refused without the weights is refused in the first turn.
    """
    config = pin_values(config, parts)
    try:
        rows = check_rows(config, parts)
        with ExitStack() as stack:
            folder, worker = _joined(config, parts, rows, stack)
            writer = stack.enter_context(writer_in(config, parts, folder, rows.schema, worker))
            attempt = JobAttempt(config, parts, rows, folder, worker, writer, signals)
            return (yield from _turns(attempt))
    except JobStopped as stopped:
        message = f"{stopped or 'Stopped before the first row.'} {how_to_resume(config.output.dir)}"
        return JobResult(0, signals.received, message)
    except FolderGone:  # others have completed the job while this worker began to join them
        with closing(open_storage(config.output.dir, config.workers)) as storage:
            ended = completed_elsewhere(storage, parts, rows=0)
        if ended is None:
            raise JobError(
                f"the workers of the job in {config.output.dir} left while this one was joining: "
                "run the same command again"
            ) from None
        return ended


def _joined(
    config: JobConfig, parts: ResolvedJob, rows: CheckedRows, stack: ExitStack
) -> tuple[JobFolder, Worker]:
    """Open the job's folder and join its workers, until the context of `stack` ends.

    In an object store, another process may open the job at the same moment; then this one tries
    again and joins it.
    """
    for tries_left in reversed(range(_JOIN_TRIES)):
        try:
            with ExitStack() as joining:
                folder = joining.enter_context(open_job_folder(config, parts, rows.schema))
                worker = joining.enter_context(worker_in(config, folder))
                stack.enter_context(joining.pop_all())
                return folder, worker
        except OpenedAnew:
            if not tries_left:
                raise
    raise AssertionError("the last try has joined or raised")


def _turns(attempt: JobAttempt) -> Turns[JobResult]:
    """Compute, grade and complete the job, together with the other workers."""
    config, parts, folder, metrics = attempt.config, attempt.parts, attempt.folder, attempt.metrics
    is_done = attempt.todo.is_empty()
    if is_done and metrics.was_complete:
        attempt.signals.deferred = True
        return (yield from already_complete(config, parts, folder, attempt.signals))
    num_rows = parts.source.num_rows
    if num_rows is not None and config.sampling.until is None:
        metrics.attempt.rows_total = num_rows * config.sampling.n
    attempt.note_read()
    if folder.exclusive and not is_done:
        card = unfinished_card(folder.storage.display_name)
        folder.storage.write(folder.path / "README.md", card)
        folder.storage.delete(folder.path / REPORT)  # it would show fewer rows
    samples = Samples(folder.path, config.score, by=config.model.grid_column)
    at_once, claim = parts.grades_at_once, partial(attempt.worker.claim, GRADING)
    needed = folder.storage.in_place and (at_once or not is_done)
    queue = GradingQueue(folder.path, config, claim, needed=needed, at_once=at_once)
    progress = config.progress
    trackers = Trackers(progress.report_to, progress.project, folder.storage.display_name)
    metrics.tell = trackers.tell
    with closing(trackers), attempt.recorded(), closing(queue):
        folder.share()
        ended = None if is_done else (yield from between(compute_rows(attempt), queue.look))
        ended = ended or (yield from between(_wait_for_others(attempt), queue.look))
        if ended is not None:
            return ended
        attempt.writer.finish(attempt.todo.num_rows)
        if parts.source.follows:
            folder.settle(job_manifest(config, parts, attempt.rows.schema))
            # The followed job is complete: whoever opens this folder later need not follow it.
            data = replace(config.dataset, follow=False)
            attempt.write_config(replace(config, dataset=data))
            attempt.note_read()
        with folder.storage.local_copy(needed=config.is_scored or config.output.report):
            scores = yield from grade_and_score(samples, config, attempt.signals, queue)
            metrics.score, metrics.adapter_scores = scores.score, scores.adapters
            return complete(config, parts, folder, attempt.rows.schema, metrics)


def _wait_for_others(attempt: JobAttempt) -> Turns[JobResult | None]:
    """Wait until this worker is to complete the job, and return None.

    Returns the job's result instead if another worker has completed the job, or a signal came.
    """
    folder, worker = attempt.folder, attempt.worker
    attempt.signals.deferred = True
    attempt.writer.flush()
    worker.beat()  # the worker that completes the job reads this worker's counts there
    _refuse_quarantined(attempt.todo, worker)
    while True:
        is_mine = worker.claim_finish()
        # Look after the claim, which is also granted if the leases of a complete job are gone.
        rows = attempt.metrics.attempt.rows
        elsewhere = completed_elsewhere(folder.storage, attempt.parts, rows)
        if elsewhere is not None:
            folder.remove_journal()  # the worker that completed the job may have been killed first
            return elsewhere
        if is_mine:
            return None
        if attempt.signals.received is not None:
            return attempt.stopped()
        yield min(1.0, worker.look_seconds)


def _refuse_quarantined(todo: ShardQueue, worker: Worker) -> None:
    """Raise JobError if the only shards left are those on which workers crashed again and again."""
    lines = []
    ended = worker.quarantined()
    for shard, rows in todo.quarantined_rows().items():
        shown_ids = ", ".join(rows[:20]) + (f" … ({len(rows):,} in all)" if len(rows) > 20 else "")
        crashed = ", ".join(map(str, ended.get(shard, ())))
        lines.append(f"shard {shard} crashed the workers {crashed}; rows not computed: {shown_ids}")
    if lines:
        raise JobError(
            "all other rows are computed, but some are in quarantine:\n  "
            + "\n  ".join(lines)
            + "\nlook at these rows, and at what the workers printed when they ended; the same "
            "command tries them again"
        )
