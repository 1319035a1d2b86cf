"""Runs a job: every row of the data set gets into the output folder exactly once."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from contextlib import closing, contextmanager, nullcontext
from dataclasses import asdict, replace
from functools import partial

from batchgen.budget.spending import Spending
from batchgen.compose.load_config import job_file_text
from batchgen.config.job_config import JobConfig
from batchgen.costs.cost_recorder import CostRecorder
from batchgen.dataset.source import Following
from batchgen.folder.dataset_card import unfinished_card
from batchgen.folder.job_folder import JobFolder
from batchgen.folder.job_metrics import Metrics
from batchgen.forecast.forecast import Forecast
from batchgen.grades.background_grading import grading_beside
from batchgen.grades.early_grades import EarlyGrades
from batchgen.jobs.checked_rows import CheckedRows, check_rows, dated, job_manifest
from batchgen.jobs.fail_fast import AllRowsFailed
from batchgen.jobs.generation import Engine, Generation
from batchgen.jobs.graded_job import scores_of
from batchgen.jobs.job_end import (
    JobResult,
    already_complete,
    complete,
    completed_elsewhere,
    new_tally,
)
from batchgen.jobs.job_parts import JobParts
from batchgen.jobs.join_folder import open_job_folder, worker_in, writer_in
from batchgen.jobs.progress import Progress, show_memory
from batchgen.jobs.turns import Turns, alone, between
from batchgen.leases.file_store import FolderGone
from batchgen.leases.lease_files import GRADING
from batchgen.report.write_report import REPORT
from batchgen.reuse.row_reuse import row_reuse
from batchgen.row_index.open_rows import data_of
from batchgen.scoring.samples import Samples
from batchgen.shards.output_writer import OutputWriter
from batchgen.storage.open_storage import open_storage
from batchgen.util.errors import ConfigError, FolderLost, JobError
from batchgen.util.signals import JobStopped, StopSignals
from batchgen.waves.sample_waves import EverySample, SampleWaves
from batchgen.waves.valid_samples import Judge
from batchgen.workers.shard_queue import ShardQueue
from batchgen.workers.worker import Worker


def run_job(config: JobConfig, parts: JobParts) -> JobResult:
    """Run a job to its end, or go on with one that was stopped or killed.

    Everything that can be refused is refused before the weights load. A first SIGINT or SIGTERM
    stops the job cleanly, a second one at once.

    Raises:
        ConfigError: the user made a mistake. No row was computed, unless the mistake is in a later
            row of the data set.
        JobError: the output cannot be written or is damaged. Finished rows are safe.
        Exception: whatever the engine or the data set raises. Finished rows are safe.
    """
    with StopSignals() as signals, closing(parts):
        return alone(job_turns(config, parts, signals))


def job_turns(config: JobConfig, parts: JobParts, signals: StopSignals) -> Turns[JobResult]:
    """The turns of `run_job`, in which `signals` say when to stop. All that can be refused without
    the weights is refused in the first turn."""
    config = dated(config, parts)
    try:
        rows = check_rows(config, parts)
        with (
            open_job_folder(config, parts, rows.schema) as folder,
            worker_in(config, folder) as worker,
            writer_in(config, parts, folder, rows.schema, worker) as writer,
        ):
            attempt = _Attempt(config, parts, rows, folder, worker, writer, signals)
            return (yield from attempt.turns())
    except JobStopped as stopped:
        message = f"{stopped or 'Stopped before the first row.'} {_resume(config.output.dir)}"
        return JobResult(0, signals.received, message)
    except FolderGone:  # others have completed the job while this worker began to join them
        with closing(open_storage(config.output.dir, config.workers)) as storage:
            ended = completed_elsewhere(storage, parts, rows=0)
        if ended is None:
            raise JobError(
                f"the workers of the job in {config.output.dir} have left it while this one "
                "began to join them: run the same command again"
            ) from None
        return ended


class _Attempt:
    """One worker's run of the job, from the open folder to its result."""

    def __init__(
        self,
        config: JobConfig,
        parts: JobParts,
        rows: CheckedRows,
        folder: JobFolder,
        worker: Worker,
        writer: OutputWriter,
        signals: StopSignals,
    ) -> None:
        self._config, self._parts, self._rows = config, parts, rows
        self._folder, self._worker, self._writer = folder, worker, writer
        self._signals = signals
        self._shown = folder.storage.shown
        if folder.exclusive:
            retried = [f"output.retry_errors: {writer.retried:,} rows"] if writer.retried else []
            folder.record(*retried, rows=writer.resumed)
            folder.storage.write(folder.path / "config.yaml", job_file_text(config))
            worker.tell_older(writer.older)
        self._metrics = self._new_metrics()
        self._metrics.attempt.devices = config.engine.tensor_parallel
        self._spending = Spending(config.budget, self._metrics, folder.storage, parts.elsewhere)
        self._todo = ShardQueue(parts.source, writer, worker, config.output.rows_per_shard)

    def turns(self) -> Turns[JobResult]:
        config, folder, metrics = self._config, self._folder, self._metrics
        is_done = self._todo.is_empty()
        if is_done and metrics.was_complete:
            self._signals.deferred = True
            return (yield from already_complete(config, self._parts, folder, self._signals))
        num_rows = self._parts.source.num_rows
        if num_rows is not None and config.sampling.until is None:
            metrics.attempt.rows_total = num_rows * config.sampling.n
        self._note_read()
        begins = folder.exclusive and not is_done
        if begins:
            folder.storage.write(folder.path / "README.md", unfinished_card(self._shown))
            folder.storage.delete(folder.path / REPORT)  # it would tell of fewer rows
        samples = Samples(folder.path, config.score)
        at_once = self._parts.grades_at_once and bool(config.post)
        needed = begins and folder.storage.in_place and not at_once
        beside = grading_beside(folder.path, config, needed=needed)
        with (
            _recorded(metrics, self._shown),
            beside as grading,
            self._early_grades(at_once) as early,
        ):
            folder.share()
            look = early.look if early is not None else _nothing
            ended = None if is_done else (yield from between(self._generate(), look))
            ended = ended or (yield from between(self._wait_for_others(), look))
            if ended is not None:
                return ended
            self._writer.finish(self._todo.num_rows)
            if isinstance(self._parts.source, Following):
                folder.settle(job_manifest(config, self._parts, self._rows.schema))
                # From now on this is a job over a complete one, to whoever opens it by its folder.
                data = replace(config.dataset, follow=False)
                text = job_file_text(replace(config, dataset=data))
                folder.storage.write(folder.path / "config.yaml", text)
                self._note_read()
            with folder.storage.local_copy(needed=bool(config.post) or config.output.report):
                process = grading if early is None else early.process
                metrics.score = yield from scores_of(samples, config, self._signals, process)
                return complete(config, self._parts, folder, self._rows.schema, metrics)

    @contextmanager
    def _early_grades(self, needed: bool) -> Iterator[EarlyGrades | None]:
        """What grades shards at once; None if that is not needed."""
        if not needed:
            yield None
            return
        claim = partial(self._worker.claim, GRADING)
        with closing(EarlyGrades(self._folder.path, self._config, claim)) as early:
            yield early

    def _new_metrics(self) -> Metrics:
        """The metrics of this attempt; only the first of several workers counts rows of earlier
        attempts."""
        folder, writer = self._folder, self._writer
        tally = new_tally(self._config, self._parts)
        for table in writer.done_rows(tally.columns) if writer.resumed and folder.exclusive else ():
            tally.add_table(table)
        path = folder.path / "metrics.json"
        return Metrics(path, writer.resumed, tally, self._worker, folder.storage)

    def _note_read(self) -> None:
        """Record in the metrics what is known of the jobs whose rows are read."""
        source = self._parts.source
        self._metrics.read_jobs = [cost for job in source.jobs for cost in job.costs]
        self._metrics.funnel = [(left.choice, left.rows) for left in data_of(source).funnel]

    def _generate(self) -> Turns[JobResult | None]:
        """Load the weights and compute rows until none is left; the result if a signal came."""
        yield 0.0  # jobs beside this one are opened before any weights load
        metrics, writer = self._metrics, self._writer
        if self._spending.is_spent:
            return self._stopped()
        engine = self._parts.build_engine()
        self._signals.deferred = True
        self._note_engine(engine)
        expected = self._predict(engine)
        parts, request = self._parts, self._rows.request
        storage, schema = self._folder.storage, self._rows.schema
        facts = parts.fingerprints, parts.max_model_len
        reuse = row_reuse(self._config, *facts, schema, storage)
        rows_per_shard = self._config.output.rows_per_shard
        costs = CostRecorder(self._folder.storage, rows_per_shard, self._worker.number)
        waves = self._waves()
        generation = Generation(
            self._config,
            parts.source,
            request,
            parts.split,
            engine,
            writer,
            metrics,
            waves,
            self._spending,
            costs,
            reuse,
        )
        shown = Progress(
            metrics.attempt.rows_total,
            writer.resumed,
            self._config.progress.show,
            self._parts.decode,
            resumed_errors=metrics.tally.totals.error_rows,
            longest=self._longest(),
            expected=expected,
            title=parts.title,
        )
        metrics.begin()
        beside = nullcontext() if reuse is None else closing(reuse)
        with closing(engine), closing(waves), beside, shown as progress:
            turns = generation.turns(self._todo, self._signals, progress, self._watch)
            is_done = yield from turns
        self._save_thumbnails()
        return None if is_done else self._stopped()

    def _watch(self) -> None:
        """What is done every few seconds while rows are computed."""
        self._parts.watch()
        self._save_thumbnails()

    def _save_thumbnails(self) -> None:
        if self._parts.images is not None:
            self._parts.images.thumbnails.save(self._folder.storage, self._worker.number)

    def _waves(self) -> EverySample:
        """What says which samples of a row begin when."""
        if self._rows.where is None:
            return EverySample()
        return SampleWaves(Judge(self._rows.where, self._config.score), self._writer)

    def _longest(self) -> int:
        """The most tokens that an answer can have."""
        sampling = self._config.sampling
        of_rows = sampling.column is not None
        return self._parts.max_model_len if of_rows else sampling.max_new_tokens

    def _note_engine(self, engine: Engine) -> None:
        """Record what the answers depend on in writer, metrics and manifest; show the memory."""
        # A GPU rounds sums differently in batches of another size, and so do other numbers of
        # ranks, which workers may have.
        on_one_cpu = engine.memory.total is None and self._config.engine.tensor_parallel == 1
        self._writer.set_exact(on_one_cpu and engine.batch_dependence is None)
        self._metrics.attempt.memory = asdict(engine.memory)
        self._metrics.attempt.batch_dependence = engine.batch_dependence
        show_memory(engine.memory)
        if engine.batch_dependence is not None:
            manifest = self._folder.manifest
            self._folder.update(replace(manifest, batch_dependence=engine.batch_dependence))

    def _predict(self, engine: Engine) -> Forecast | None:
        """What this attempt will take, which metrics.json keeps beside what it took."""
        attempt = self._metrics.attempt
        if attempt.rows_total is None:
            return None
        answers = attempt.rows_total - attempt.rows_resumed
        expected = self._parts.predict(engine, answers, self._metrics.age)
        if expected is not None:
            self._metrics.predicted = expected.summary()
        return expected

    def _wait_for_others(self) -> Turns[JobResult | None]:
        """Wait until this worker is the one that completes the job, which is None, or until
        another has completed it or a signal came, which is how the job ended for this worker."""
        folder, worker = self._folder, self._worker
        self._signals.deferred = True
        self._writer.flush()
        worker.beat()  # the worker that completes the job says what this one has computed
        _refuse_quarantined(self._todo, worker)
        while True:
            is_mine = worker.claim_finish()
            # After the claim: it is granted, too, where the leases of a complete job are gone.
            rows = self._metrics.attempt.rows
            elsewhere = completed_elsewhere(folder.storage, self._parts, rows)
            if elsewhere is not None:
                folder.remove_journal()  # the one that completed it may have been killed before
                return elsewhere
            if is_mine:
                return None
            if self._signals.received is not None:
                return self._stopped()
            yield min(1.0, worker.look_seconds)

    def _stopped(self) -> JobResult:
        self._writer.flush()
        self._metrics.save("stopped")
        done = self._metrics.attempt.rows + self._metrics.attempt.rows_resumed
        if self._signals.received is None and self._spending.is_spent:
            message = f"{self._spending.text()}\nStopped with {done:,} rows done in {self._shown}."
            return JobResult(0, None, message, is_spent=True)
        message = f"Stopped with {done:,} rows done. {_resume(self._shown)}"
        return JobResult(0, self._signals.received, message)


def _nothing() -> None:
    """Nothing is looked at between turns."""


def _refuse_quarantined(todo: ShardQueue, worker: Worker) -> None:
    """End a job in which all is done but shards that have ended workers again and again."""
    lines = []
    ended = worker.quarantined()
    for shard, rows in todo.quarantined_rows().items():
        some = ", ".join(rows[:20]) + (f" … ({len(rows):,} in all)" if len(rows) > 20 else "")
        who = ", ".join(map(str, ended.get(shard, ())))
        lines.append(f"shard {shard} has ended the workers {who}; rows not computed: {some}")
    if lines:
        raise JobError(
            "all other rows are computed, but some are in quarantine:\n  "
            + "\n  ".join(lines)
            + "\nlook at these rows, and at what the workers printed when they ended; the same "
            "command tries them again"
        )


@contextmanager
def _recorded(metrics: Metrics, shown: str) -> Iterator[None]:
    """Save in metrics.json how the job ended, and tell with an error what is safe."""
    metrics.save("running")
    try:
        yield
    except JobStopped:
        metrics.save("stopped")
        raise
    except Exception as error:
        if isinstance(error, FolderLost):
            raise
        # The same command would only repeat a mistake that shows when the engine is built.
        if metrics.attempt.rows or not isinstance(error, (ConfigError, AllRowsFailed)):
            error.add_note(f"Finished rows are safe. {_resume(shown)}")
        # On a full disk this fails too. The first error must stay the one that the user sees.
        with contextlib.suppress(JobError):
            metrics.save("failed")
        raise


def _resume(shown: str) -> str:
    return f"The output so far is in {shown}; run the same command to go on from there."
