"""One worker's attempt at a job, from the open folder to its result. `run_job.py` makes it."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict

from batchgen.config.compose.load_config import job_file_text
from batchgen.config.groups.job_config import JobConfig
from batchgen.config.groups.model_sampling import sampling_values
from batchgen.jobs.generation.fail_fast import AllRowsFailed
from batchgen.jobs.generation.shard_queue import ShardQueue
from batchgen.jobs.generation.spending import Spending
from batchgen.jobs.generation.worker import Worker
from batchgen.jobs.resolve.resolved_job import ResolvedJob
from batchgen.jobs.run.checked_rows import CheckedRows
from batchgen.jobs.run.job_end import JobResult, new_tally
from batchgen.storage.folder.job_folder import JobFolder
from batchgen.storage.metrics.job_metrics import Metrics
from batchgen.storage.shards.output_writer import OutputWriter
from batchgen.util.errors import ConfigError, FolderLost, JobError
from batchgen.util.signals import JobStopped, StopSignals


class JobAttempt:
    """The objects that one worker's run of a job shares, and how the run reports its end.

    Attributes:
        config, parts, rows: the job: its configuration, the opened job, and what makes the requests
            of its rows.
        folder: its output folder.
        worker, writer: this process among the job's workers, and the writer of its rows.
        signals: the signals that stop the job.
        metrics: the content of metrics.json.
        spending: how much of the budget is used.
        todo: the rows to compute.
    """

    def __init__(
        self,
        config: JobConfig,
        parts: ResolvedJob,
        rows: CheckedRows,
        folder: JobFolder,
        worker: Worker,
        writer: OutputWriter,
        signals: StopSignals,
    ) -> None:
        """Write the job's configuration and manifest, unless other workers run in the folder."""
        self.config, self.parts, self.rows = config, parts, rows
        self.folder, self.worker, self.writer = folder, worker, writer
        self.signals = signals
        if folder.exclusive:
            retried = [f"output.retry_errors: {writer.retried:,} rows"] if writer.retried else []
            folder.record(*retried, rows=writer.resumed)
            self.write_config(config)
            worker.tell_older(writer.older)
        self.metrics = self._new_metrics()
        self.metrics.sampling = sampling_values(asdict(config.sampling), parts.model_sampling)
        self.metrics.attempt.devices = config.engine.tensor_parallel
        self.spending = Spending(config.budget, self.metrics, folder.storage, parts.elsewhere)
        self.todo = ShardQueue(parts.source, writer, worker, config.output.rows_per_shard)

    def _new_metrics(self) -> Metrics:
        """The metrics of this attempt. Only the first of several workers counts the rows of earlier
        attempts."""
        folder, writer = self.folder, self.writer
        tally = new_tally(self.config, self.parts)
        for table in writer.done_rows(tally.columns) if writer.resumed and folder.exclusive else ():
            tally.add_table(table)
        path = folder.path / "metrics.json"
        return Metrics(path, writer.resumed, tally, self.worker, folder.storage)

    def write_config(self, config: JobConfig) -> None:
        """Write config.yaml, by which verbs open the job's folder."""
        self.folder.storage.write(self.folder.path / "config.yaml", job_file_text(config))

    def note_read(self) -> None:
        """Record in the metrics the costs of the jobs whose rows are read, and how many rows each
        step left."""
        source = self.parts.source
        self.metrics.read_jobs = [cost for job in source.jobs for cost in job.costs]
        self.metrics.funnel = [(left.choice, left.rows) for left in source.data.funnel]

    @contextmanager
    def recorded(self) -> Iterator[None]:
        """A context after which metrics.json says how the job ended. An error gets a note that says
        which rows are safe."""
        metrics, display_name = self.metrics, self.folder.storage.display_name
        metrics.save("running")
        try:
            yield
        except JobStopped:
            metrics.save("stopped")
            raise
        except Exception as error:
            if isinstance(error, FolderLost):
                raise
            # A mistake that shows when the engine is built gets no note, because the same command
            # would only repeat it.
            if metrics.attempt.rows or not isinstance(error, (ConfigError, AllRowsFailed)):
                error.add_note(f"Finished rows are safe. {how_to_resume(display_name)}")
            # On a full disk this fails too. The first error must stay the one that the user sees.
            with contextlib.suppress(JobError):
                metrics.save("failed")
            raise

    def stopped(self) -> JobResult:
        """The result of an attempt that ends before the job: by a signal, or a spent budget."""
        self.writer.flush()
        self.metrics.save("stopped")
        done = self.metrics.attempt.rows + self.metrics.attempt.rows_resumed
        display_name = self.folder.storage.display_name
        recorded = self.metrics.attempt.rows_recorded
        begun = f" and {recorded:,} begun" if recorded else ""
        if self.signals.received is None and self.spending.is_spent:
            message = (
                f"{self.spending.text()}\n"
                f"Stopped with {done:,} answers done{begun} in {display_name}."
            )
            return JobResult(0, None, message, is_spent=True)
        message = f"Stopped with {done:,} answers done{begun}. {how_to_resume(display_name)}"
        return JobResult(0, self.signals.received, message)


def how_to_resume(display_name: str) -> str:
    """The sentence that says how to resume a stopped job."""
    return f"The output so far is in {display_name}; run the same command to resume."
