"""Supervises the workers that a launcher starts: one job, one progress bar, one exit code.

`LocalLauncher` and `RayLauncher` call `Supervisor.run`.
"""

from __future__ import annotations

import math
import signal
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from batchgen.config.groups.launcher_config import Launched
from batchgen.jobs.launchers.launched import COMPLETE, SPENT, LaunchedFolder, counted_rows
from batchgen.jobs.launchers.process import End, Output, StartedWorker
from batchgen.util.signals import StopSignals

if TYPE_CHECKING:
    from batchgen.jobs.launchers.launch_progress import LaunchProgress

_LOOK_SECONDS = 0.2  # between two looks at the workers
_LAST_LINES = 15  # of stderr of a worker that failed
_GRACE_SECONDS = 30.0
"""Seconds that workers have to notice that the job is complete, before they are stopped."""


@dataclass
class WorkerSlot:
    """One of the workers. If it is restarted, one process after another runs it.

    Attributes:
        number: the index of the worker among those of the launcher.
        output: the files for stdout and stderr.
        process: the present process.
        starts: how many processes were started.
        stopped: whether the present process was asked to stop.
        came_late: whether the process ended because the others had completed the job.
        end: how the last process ended; None while it runs.
    """

    number: int
    output: Output
    process: StartedWorker = field(init=False)
    starts: int = 0
    stopped: bool = False
    came_late: bool = False
    end: End | None = None

    @property
    def name(self) -> str:
        return f"worker {self.number}"

    @property
    def is_running(self) -> bool:
        """Whether a process was started and has not ended."""
        return self.starts > 0 and self.end is None

    @property
    def is_clean(self) -> bool:
        """Whether the worker has seen the job complete."""
        return self.end is not None and self.end.code in COMPLETE

    @property
    def is_out_of_budget(self) -> bool:
        """Whether the worker stopped because the job's budget was spent."""
        return self.end is not None and self.end.code == SPENT

    @property
    def has_failed(self) -> bool:
        """Whether the worker has ended by itself, and left work to the others."""
        ended = self.end is not None and self.end.code is not None
        is_fine = self.is_clean or self.is_out_of_budget
        return ended and not (is_fine or self.stopped or self.came_late)

    def printed(self, stream: int) -> str:
        """What its processes printed on stdout (0) or stderr (1)."""
        path = self.output[stream]
        return path.read_text(encoding="utf-8", errors="replace") if path.exists() else ""

    def stop(self, number: int) -> None:
        """Ask the present process to stop, if it runs and was not asked yet."""
        if self.is_running and not self.stopped:
            self.stopped = True
            self.process.stop(number)


class Supervisor:
    """Starts the workers, restarts those that were killed, and stops all of them at the end."""

    def __init__(
        self,
        folder: LaunchedFolder,
        outputs: Sequence[Output],
        start: Callable[[WorkerSlot], StartedWorker],
        *,
        restarts: int,
        title: str,
        patience: float = math.inf,
    ) -> None:
        """Prepare one worker for each of `outputs`.

        Args:
            start: starts a process of a worker.
            restarts: how many times a worker is started again.
            title: the first line of the display.
            patience: seconds to wait for workers that were asked to stop.
        """
        self._folder = folder
        self._slots = [WorkerSlot(number, output) for number, output in enumerate(outputs)]
        self._start_process = start
        self._restarts = restarts
        self._title = title
        self._patience = patience
        self._complete_since: float | None = None

    def run(self) -> Launched:
        """Run the job to its end, or until a signal.

        Raises:
            ConfigError: a worker cannot run on the machine that it was given.
        """
        from batchgen.jobs.launchers.launch_progress import LaunchProgress  # loads pyarrow

        with StopSignals() as signals:
            signals.deferred = True
            with LaunchProgress(self._folder, self._title) as progress:
                try:
                    for slot in self._slots:
                        self._start(slot)
                    self._watch(signals, progress)
                finally:
                    self._stop(signal.SIGTERM)
                    self._folder.release()
            return self._result(signals.received)

    def _start(self, slot: WorkerSlot) -> None:
        slot.process = self._start_process(slot)
        slot.starts += 1
        slot.end, slot.stopped = None, False

    def _watch(self, signals: StopSignals, output: LaunchProgress) -> None:
        """Wait for the end of all workers."""
        while running := [slot for slot in self._slots if slot.is_running]:
            self._folder.hold()
            for slot in running:
                if signals.received is not None:
                    self._stop(signals.received)
                    return
                self._look(slot, output)
            self._stop_unneeded()
            output.show(sum(s.is_running and not s.process.has_begun() for s in self._slots))
            time.sleep(_LOOK_SECONDS)

    def _look(self, slot: WorkerSlot, output: LaunchProgress) -> None:
        """Check whether the process of a worker has ended, and start it again if that may help."""
        slot.end = slot.process.poll()
        if slot.end is None or slot.is_clean or slot.stopped:
            return
        end, was_killed = slot.end, slot.end.code is None
        slot.came_late = end.code == 1 and self._folder.is_complete()
        is_job_complete = any(other.is_clean for other in self._slots)
        # Exit code 1 is an error while the job ran, and 2 a mistake of the user. A worker that
        # failed before its first row would fail again.
        may_help = was_killed or (end.code == 1 and self._folder.has_rows_of(end.process))
        restart = may_help and not is_job_complete and slot.starts <= self._restarts
        restart = restart and (was_killed or not self._folder.has_quarantined())
        if restart or was_killed:
            output.print(f"{slot.name} {end.how}{' and is started again' if restart else ''}")
        if restart:
            self._start(slot)

    def _stop_unneeded(self) -> None:
        """Once the job is complete, stop the workers that wait for a machine, and later those that
        still run."""
        if not any(slot.is_clean for slot in self._slots):
            return
        now = time.monotonic()
        self._complete_since = self._complete_since or now
        for slot in self._slots:
            late = now - self._complete_since > _GRACE_SECONDS
            if slot.is_running and (late or not slot.process.has_begun()):
                slot.stop(signal.SIGTERM)

    def _stop(self, number: int) -> None:
        """Ask the workers that run to stop, and wait for them: each finishes its step first."""
        for slot in self._slots:
            slot.stop(number)
        until = time.monotonic() + self._patience
        while running := [slot for slot in self._slots if slot.is_running]:
            if time.monotonic() > until:
                names = ", ".join(slot.name for slot in running)
                print(f"{names}: asked to stop, no answer since", file=sys.stderr)
                return
            for slot in running:
                slot.end = slot.process.poll()
            time.sleep(_LOOK_SECONDS / 4)

    def _result(self, stopped_by: int | None) -> Launched:
        """The exit code and the last message of the launch, from how the workers have ended."""
        clean = [slot for slot in self._slots if slot.is_clean]
        if clean:
            code = min(slot.end.code or 0 for slot in clean if slot.end is not None)
            # The worker that completed the job has the whole summary.
            texts = [slot.printed(0) for slot in clean if slot.end and slot.end.code == code]
            _print_last_lines([slot for slot in self._slots if slot.has_failed])
            return Launched(code, None, min(texts, key=_is_of_bystander).rstrip("\n"))
        if stopped_by is not None:
            rows, _ = counted_rows(self._folder.beats())
            message = (
                f"Stopped all workers with {rows:,} answers done. The output so far is in "
                f"{self._folder.path}; run the same command to resume."
            )
            return Launched(128 + stopped_by, stopped_by, message)
        if spent := [slot for slot in self._slots if slot.is_out_of_budget]:
            _print_last_lines([slot for slot in self._slots if slot.has_failed])
            # The last two lines on stderr say what was spent, and how many answers are done.
            return Launched(SPENT, None, "\n".join(spent[-1].printed(1).splitlines()[-2:]))
        _print_last_lines(self._slots)
        codes = {None if slot.end is None else slot.end.code for slot in self._slots}
        return Launched(
            2 if codes == {2} else 1, None, "No worker could complete the job; see above."
        )


def _print_last_lines(slots: Sequence[WorkerSlot]) -> None:
    """Print the last lines of output of the workers that failed."""
    for slot in slots:
        how = "has not ended" if slot.end is None else slot.end.how
        lines = slot.printed(1).splitlines()[-_LAST_LINES:]
        print(f"── {slot.name} {how}:", *lines, sep="\n", file=sys.stderr)


def _is_of_bystander(text: str) -> bool:
    """Whether a summary is that of a worker that did not complete the job itself."""
    return text.startswith("The job is complete;")
