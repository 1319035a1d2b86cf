"""Supervises the workers that a launcher starts: one job, one progress bar, one exit code."""

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

_LOOK_SECONDS = 0.2
_LAST_LINES = 15
_GRACE_SECONDS = 30.0
"""Seconds that workers have to see that the job is complete, before they are stopped."""


@dataclass
class WorkerSlot:
    """One of the workers, run by one process after another if it is restarted; `output` are the
    files for its stdout and stderr.

    `stopped` says that the present process was asked to stop, `came_late` that it ended because the
    others had completed the job; `end` is how the last process ended, None while it runs.
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
        """Whether its worker has seen the job complete."""
        return self.end is not None and self.end.code in COMPLETE

    @property
    def is_out_of_budget(self) -> bool:
        return self.end is not None and self.end.code == SPENT

    @property
    def has_failed(self) -> bool:
        """Whether its worker has ended by itself, and left work to the others."""
        ended = self.end is not None and self.end.code is not None
        is_fine = self.is_clean or self.is_out_of_budget
        return ended and not (is_fine or self.stopped or self.came_late)

    def printed(self, stream: int) -> str:
        """The output of its processes on stdout (0) or stderr (1)."""
        path = self.output[stream]
        return path.read_text(encoding="utf-8", errors="replace") if path.exists() else ""

    def stop(self, number: int) -> None:
        """Tell its process to stop, if there is one that was not yet asked to."""
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
        """Each worker has its files in `outputs`, is started by `start` and again at most
        `restarts` times. Workers that were told to stop are waited for `patience` seconds."""
        self._folder = folder
        self._slots = [WorkerSlot(number, output) for number, output in enumerate(outputs)]
        self._start_process = start
        self._restarts = restarts
        self._title = title
        self._patience = patience
        self._complete_since: float | None = None

    def run(self) -> Launched:
        """Run the job to its end, or until a signal. ConfigError if a worker cannot run where it
        was put."""
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
            self._stop_the_needless()
            output.show(sum(p.is_running and not p.process.has_begun() for p in self._slots))
            time.sleep(_LOOK_SECONDS)

    def _look(self, slot: WorkerSlot, output: LaunchProgress) -> None:
        """Check whether the process of a worker has ended, and start it again if that may help."""
        slot.end = slot.process.poll()
        if slot.end is None or slot.is_clean or slot.stopped:
            return
        end, killed = slot.end, slot.end.code is None
        slot.came_late = end.code == 1 and self._folder.is_complete()
        over = any(other.is_clean for other in self._slots)
        # A worker that failed before its first row would fail again.
        helps = killed or (end.code == 1 and self._folder.has_rows_of(end.process))
        again = helps and not over and slot.starts <= self._restarts
        again = again and (killed or not self._folder.has_quarantined())
        if again or killed:
            output.print(f"{slot.name} {end.how}{' and is started again' if again else ''}")
        if again:
            self._start(slot)

    def _stop_the_needless(self) -> None:
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
        """Stop the workers that run, and wait for them: each finishes its step first."""
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
    return text.startswith("The job is complete;")
