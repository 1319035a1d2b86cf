"""A tracker that prints the progress as a line of JSON a minute, for programs that batchgen does
not know (`progress.report_to=json`)."""

from __future__ import annotations

import json
import time
from collections.abc import Mapping

from batchgen.jobs.trackers.trackers import Run, Tracker

SECONDS = 60.0  # between two lines


class _Lines:
    """Prints the newest values of a run, at most once in SECONDS."""

    def __init__(self, run: Run) -> None:
        self._run, self._next = run, 0.0
        self._held: Mapping[str, float] | None = None

    def log(self, values: Mapping[str, float]) -> None:
        self._held = values
        if time.monotonic() >= self._next:
            self._next = time.monotonic() + SECONDS
            self._print()

    def close(self) -> None:
        self._print()

    def _print(self) -> None:
        """Print the newest values, if they were not printed yet."""
        if self._held is not None:
            line = json.dumps({"run": self._run.name, **self._held})
            print(line, flush=True)
        self._held = None


def begin(run: Run) -> Tracker:
    """Begin to print the lines of a job's run; the last values are printed at its end."""
    return _Lines(run)
