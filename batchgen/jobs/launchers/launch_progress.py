"""The display of a launcher while its workers run: one progress bar for all of them.

`Supervisor` calls `LaunchProgress.show` at every look at the workers.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Mapping, Sequence
from typing import Any, Self

from tqdm import tqdm

from batchgen.jobs.launchers.launched import LaunchedFolder, counted_errors, counted_rows
from batchgen.storage.folder.job_summary import tokens_per_s
from batchgen.util.duration import duration
from batchgen.util.text.text_table import counted

_LINE_SECONDS = 30.0  # between two lines where there is no terminal
_BAR_SECONDS = 1.0  # between two updates of the bar


class LaunchProgress:
    """A bar over the rows of all workers, or a line every 30 seconds if there is no terminal."""

    def __init__(self, folder: LaunchedFolder, title: str) -> None:
        self._folder = folder
        self._is_terminal = sys.stderr.isatty()
        self._bar = tqdm(
            disable=not self._is_terminal,
            dynamic_ncols=True,
            bar_format="{percentage:3.0f}%|{bar}| {n:,}/{total:,} answers{postfix}",
            total=1,
        )
        self._begun = self._shown = time.monotonic()
        self._first: int | None = None  # rows that were finished when the first worker reported
        self.print(f"{title}; batchgen status {folder.path} shows what each worker does")

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._bar.close()

    def show(self, waiting: int) -> None:
        """Show how far the job is, unless it was just shown. `waiting` is the number of workers
        that wait for a machine."""
        now = time.monotonic()
        if now - self._shown < (_BAR_SECONDS if self._is_terminal else _LINE_SECONDS):
            return
        self._shown = now
        beats = self._folder.beats()
        facts = self._facts(now, beats) + ([f"{waiting} waiting"] if waiting else [])
        rows, total = counted_rows(beats)
        if self._is_terminal:
            self._bar.total, self._bar.n = max(total or rows, 1), rows
            self._bar.set_postfix_str(", ".join(facts))
        else:
            done = f"{rows:,}" + (f"/{total:,}" if total is not None else "")
            self.print(", ".join([f"{done} answers", *facts]))

    def print(self, text: str) -> None:
        """Print above the bar, if there is one."""
        tqdm.write(text, file=sys.stderr)
        sys.stderr.flush()

    def _facts(self, now: float, beats: Sequence[Mapping[str, Any]]) -> list[str]:
        """The figures next to the bar: speed, workers, errors and the time left."""
        running = [beat for beat in beats if beat["ended"] is None]
        attempts = [beat["attempt"] for beat in running if "attempt" in beat]
        speed = sum(map(tokens_per_s, attempts))
        facts = [f"{speed:,.0f} tok/s", f"{len(running)} workers"]
        if errors := counted_errors(beats):
            facts.append(counted(errors, "error"))
        rows, total = counted_rows(beats)
        if self._first is None and attempts:
            self._first, self._begun = rows, now
        if total is not None and self._first is not None and rows > self._first:
            left = (total - rows) * (now - self._begun) / (rows - self._first)
            facts.append(f"{duration(left, 0)} left")
        return facts
