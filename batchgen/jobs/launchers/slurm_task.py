"""A task of a Slurm job array: what it runs on its node, and how the launcher sees it."""

from __future__ import annotations

import os
import signal
import threading
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from types import FrameType
from typing import Any

import submitit
from submitit.core.utils import FailedJobError, FailedSubmissionError, UncompletedJobError
from submitit.helpers import DelayedSubmission

from batchgen.jobs.launchers.launched import remove_logs
from batchgen.jobs.launchers.process import End, Output, WorkerProcess
from batchgen.jobs.launchers.supervisor import Place
from batchgen.util.errors import ConfigError

_ASK_SECONDS = 30.0
"""How often Slurm is asked how the tasks are; their results are seen as files, at once."""
_CANCELLED = End(143, "was cancelled")


@dataclass
class SlurmTask:
    """Runs a worker as a child of the task's own process.

    Slurm says USR2 some time before it ends the task, because its time is over or another job is to
    have the node. Submitit then calls `checkpoint`, which stops the worker in order, and requeues
    the task; its next start goes on with the job. With SIGTERM alone Slurm itself requeues the
    tasks that still run when it kills them. Variables of `environment` are set unless the node sets
    them, and with `own_group` the worker is out of the reach of Ctrl-C in this terminal.
    """

    arguments: Sequence[str]
    output: Output
    environment: Mapping[str, str]
    own_group: bool = True
    _worker: WorkerProcess | None = field(default=None, init=False, repr=False)
    _waiter: threading.Thread | None = field(default=None, init=False, repr=False)
    _may_be_requeued: bool = field(default=False, init=False, repr=False)

    def __call__(self) -> End:
        """Run the worker to its end."""
        environment = {k: v for k, v in self.environment.items() if k not in os.environ}
        self._worker = WorkerProcess(self.arguments, self.output, environment, self.own_group)
        # Popen.wait cannot be called again by a handler that interrupts it; to join a thread can.
        self._waiter = threading.Thread(target=self._worker.wait)
        self._waiter.start()
        if self.own_group and threading.current_thread() is threading.main_thread():
            signal.signal(signal.SIGTERM, self._on_term)
        try:
            self._waiter.join()
        except KeyboardInterrupt:
            self._stop_worker()
        while self._may_be_requeued:  # Slurm requeues none that have ended by themselves
            time.sleep(1.0)
        return self._worker.wait()

    def checkpoint(self) -> DelayedSubmission:
        """Stop the worker, and say what the task runs when it is started again."""
        self._stop_worker()
        return DelayedSubmission(replace(self))

    def _on_term(self, number: int, frame: FrameType | None) -> None:
        self._may_be_requeued = True
        if self._worker is not None and self._worker.poll() is None:
            self._worker.stop()

    def _stop_worker(self) -> None:
        if self._worker is not None and self._waiter is not None:
            if self._waiter.is_alive():
                self._worker.stop()
            self._waiter.join()


def submit(
    executor: submitit.AutoExecutor, tasks: Sequence[SlurmTask], logs: Path
) -> list[submitit.Job[End]]:
    """Submit the tasks as one array; ConfigError if Slurm refuses it."""
    try:
        jobs: list[submitit.Job[End]] = executor.submit_array(tasks)
    except (FailedJobError, FailedSubmissionError) as error:
        remove_logs(logs)
        raise ConfigError(f"launcher=slurm: sbatch refuses the workers: {error}") from None
    return jobs


class Queue:
    """Asks Slurm how all tasks are, now and then; without a watcher there is nothing to ask."""

    def __init__(self, watcher: Any) -> None:
        self._watcher = watcher
        self._asked = time.monotonic()

    def ask(self, seconds: float) -> None:
        """Ask, if the last answer is older than `seconds`."""
        if self._watcher is not None and time.monotonic() - self._asked > seconds:
            self._watcher.update()
            self._asked = time.monotonic()


class TaskProcess:
    """A task of the array, as the launcher sees it."""

    def __init__(self, job: submitit.Job[End], place: Place, queue: Queue) -> None:
        self._job = job
        self._log = place.output[1]
        self._queue = queue
        self._is_cancelled = False

    def has_begun(self) -> bool:
        return self._log.exists()

    def poll(self) -> End | None:
        self._queue.ask(_ASK_SECONDS / 10 if self._is_cancelled else _ASK_SECONDS)
        if not self._job.done():
            return None
        if self._is_cancelled:
            return _CANCELLED
        try:
            end: End = self._job.result()
        except FailedJobError as error:
            return End(1, f"failed: {str(error).strip()}")
        except UncompletedJobError:
            return End(None, f"has left no result (state {self._job.state})")
        return end

    def stop(self, number: int) -> None:
        self._is_cancelled = True
        self._job.cancel(check=False)
