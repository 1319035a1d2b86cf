"""The rows that two jobs answer differently well."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from threading import Lock
from typing import TYPE_CHECKING

from batchgen.command.compare import compared, comparison_lines
from batchgen.command.graded_job import GradedJob
from batchgen.errors import ConfigError
from batchgen.viewer.job_view import JobView

if TYPE_CHECKING:
    from batchgen.scoring.compare import Comparison, Question

MOST_ANSWERS = 500_000
"""Of each job: a comparison holds all marks in memory, about 1 kB for each."""


@dataclass(frozen=True)
class Flipped:
    """How two jobs compare.

    Attributes:
        comparison: of their marks.
        differs: what makes them different exams, a sentence each; empty if they are one.
    """

    comparison: Comparison
    differs: tuple[str, ...]

    @property
    def lines(self) -> list[tuple[str, str]]:
        """A name and a value for each line that `batchgen compare` prints."""
        return comparison_lines(self.comparison)

    @cached_property
    def flipped(self) -> list[Question]:
        """The questions that B answers worse, then those that it answers better."""
        return [*self.comparison.losses, *self.comparison.wins]


class Flips:
    """Compares two jobs when the page is first asked for, and again when a job has changed."""

    def __init__(self, a: JobView, b: JobView) -> None:
        self._jobs = (a, b)
        self._lock = Lock()
        self._known: dict[bool, tuple[tuple[int, ...], Flipped | ConfigError]] = {}

    def find(self, *, anyway: bool) -> Flipped:
        """The comparison.

        Args:
            anyway: compare different exams, too.

        Raises:
            ConfigError: as `batchgen compare`, or the jobs are too large for a page.
            JobError: a file is damaged.
        """
        with self._lock:
            stamps = tuple(stamp for job in self._jobs for stamp in job.rows.stamps)
            known = self._known.get(anyway)
            if known is None or known[0] != stamps:
                known = self._known[anyway] = stamps, self._compared_or_refused(anyway)
        if isinstance(known[1], ConfigError):
            raise known[1]
        return known[1]

    def _compared_or_refused(self, anyway: bool) -> Flipped | ConfigError:
        try:
            return self._compared(anyway)
        except ConfigError as error:  # it takes as long to find, and is asked for as often
            return error

    def _compared(self, anyway: bool) -> Flipped:
        for job in self._jobs:
            if job.metrics.get("rows", 0) > MOST_ANSWERS:
                raise ConfigError(
                    f"{job.name} has more than {MOST_ANSWERS:,} answers, which is too many for a "
                    "page: batchgen compare lists the flipped rows"
                )
        jobs = [GradedJob(str(job.path), "view") for job in self._jobs]
        return Flipped(*compared(jobs, anyway=anyway))
