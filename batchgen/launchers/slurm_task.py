"""What a task of a Slurm job array runs: one worker, which is requeued when it has to leave."""

from __future__ import annotations

import os
import signal
import threading
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from types import FrameType

from submitit.helpers import DelayedSubmission

from batchgen.launchers.process import End, Output, WorkerProcess


@dataclass
class SlurmTask:
    """Runs a worker as a child of the task's own process.

    Slurm says USR2 some time before it ends the task, because its time is over or another job is
    to have the node. Submitit then calls `checkpoint`, which stops the worker in order, and
    requeues the task; its next start goes on with the job. With SIGTERM alone Slurm leaves it to
    itself to requeue the task, which it does with those that still run when it kills them.

    Attributes:
        arguments: of the worker's interpreter.
        environment: variables that the worker has if the node does not set them.
        own_group: whether the worker is out of the reach of Ctrl-C in this terminal.
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
