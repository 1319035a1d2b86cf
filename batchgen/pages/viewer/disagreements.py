"""Finds the rows for which two jobs gave answers of different quality, for the viewer's comparison
page. Such rows are *flipped*: of two jobs A and B, B answers the question worse or better than A.

Two jobs are the same *exam* if they were asked the same questions and marked in the same way; only
then do their scores compare.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from threading import Lock
from typing import TYPE_CHECKING, NamedTuple

from batchgen.evals.graders.step import MARK
from batchgen.evals.scores.compared_jobs import compare_jobs, comparison_lines
from batchgen.evals.scores.graded_folder import GradedJob, scoring
from batchgen.pages.rows.row_facts import RowFacts
from batchgen.pages.viewer.job_view import JobView
from batchgen.pages.viewer.listed_rows import Line, row_lines
from batchgen.pages.viewer.rows.filters import SampleFilter
from batchgen.pages.viewer.rows.search import Search
from batchgen.util.errors import ConfigError
from batchgen.util.text.text_table import number_text, percent_text

if TYPE_CHECKING:
    from batchgen.evals.scores.paired_comparison import Comparison, PairedQuestion

MOST_ANSWERS = 500_000
"""Answers that each job may have: a comparison holds all marks in memory, about 1 kB each."""


@dataclass(frozen=True)
class Flipped:
    """The comparison of two jobs, A and B."""

    comparison: Comparison
    differs: tuple[str, ...]  # what makes them different exams, a sentence each
    column: str  # the scored column

    @property
    def lines(self) -> list[tuple[str, str]]:
        """A name and a value for each line that says how the scores differ."""
        return comparison_lines(self.comparison, self.column)

    def shown(self, value: float) -> str:
        """Format a question's mean score: marks in percent, other values as numbers."""
        return percent_text(value) if self.column == MARK else number_text(value)

    @cached_property
    def flipped(self) -> list[PairedQuestion]:
        """The questions that B answers worse than A, then those that B answers better."""
        return [*self.comparison.losses, *self.comparison.wins]


@dataclass(frozen=True)
class FlippedRow:
    """A question that one job answers better than the other, with samples that show it."""

    question: PairedQuestion
    line: Line | None  # None if the row is gone
    samples: tuple[RowFacts | None, RowFacts | None]
    """A sample of A and one of B; None for a job without the row. If B is worse, they are A's best
    and B's worst; otherwise A's worst and B's best."""

    @property
    def is_worse(self) -> bool:
        """Whether B answers it worse."""
        return self.question.b < self.question.a


class _Result(NamedTuple):
    """The result of a comparison, and when the folders of both jobs had changed before it."""

    stamps: tuple[int, ...]
    comparison: Flipped | ConfigError


class Flips:
    """Compares two jobs when the page is first requested, and again when a job has changed. Until
    then the result is kept, also if it is an error."""

    def __init__(self, a: JobView, b: JobView) -> None:
        self._jobs = (a, b)
        self._lock = Lock()
        # The last result for each value of `anyway`.
        self._known: dict[bool, _Result] = {}

    def find(self, *, anyway: bool) -> Flipped:
        """Return the comparison, which is computed anew only if a job has changed.

        Args:
            anyway: whether to compare different exams too.

        Raises:
            ConfigError: as `batchgen compare`, or the jobs are too large for a page.
        """
        with self._lock:
            stamps = tuple(stamp for job in self._jobs for stamp in job.rows.stamps)
            known = self._known.get(anyway)
            if known is None or known.stamps != stamps:
                known = _Result(stamps, self._compared_or_refused(anyway=anyway))
                self._known[anyway] = known
        if isinstance(known.comparison, ConfigError):
            raise known.comparison
        return known.comparison

    def rows(self, questions: Sequence[PairedQuestion]) -> list[FlippedRow]:
        """Return a row for each of some questions, in their order.

        Raises:
            StillSearching: it takes long to find the rows.
        """
        first = self._jobs[0]
        row_of = {question.row_id: first.ids.find(question.row_id) for question in questions}
        # `row_lines` takes the numbers of each row's matching samples, and reads all samples of the
        # row. The numbers do not matter here, because the comparison shows no matches.
        hits = {index: [0] for index in sorted(p for p in row_of.values() if p is not None)}
        shown_lines = row_lines(self._jobs, Search(first.rows, SampleFilter()), hits)
        lines = {line.index: line for line in shown_lines}
        rows = []
        for question in questions:
            index, worse = row_of[question.row_id], question.b < question.a
            line = None if index is None else lines.get(index)
            a, b = ([], []) if line is None else line.jobs
            samples = _extreme(a, best=worse), _extreme(b, best=not worse)
            rows.append(FlippedRow(question, line, samples))
        return rows

    def _compared_or_refused(self, *, anyway: bool) -> Flipped | ConfigError:
        """Compare the jobs. An error is returned, not raised, so that it is cached as well: it
        takes as long to find as a comparison, and is requested as often."""
        try:
            return self._compared(anyway=anyway)
        except ConfigError as error:
            return error

    def _compared(self, *, anyway: bool) -> Flipped:
        """Compare the jobs. Raises ConfigError as `find`."""
        for job in self._jobs:
            if job.metrics.get("rows", 0) > MOST_ANSWERS:
                raise ConfigError(
                    f"{job.name} has more than {MOST_ANSWERS:,} answers, which is too many for a "
                    "page: batchgen compare lists the flipped rows"
                )
        jobs = [GradedJob(str(job.path), "view") for job in self._jobs]
        column = scoring(jobs[0], ()).score.column
        return Flipped(*compare_jobs(jobs, anyway=anyway), column)


def _extreme(samples: Sequence[RowFacts], *, best: bool) -> RowFacts | None:
    """Return the sample with the best mark, or with the worst; the first sample if none has a mark,
    and None if there are no samples."""
    marked = [sample for sample in samples if sample.grade("mark") is not None]
    choose = max if best else min
    chosen = choose(marked, key=lambda sample: float(sample.grade("mark")), default=None)
    return next(iter(samples), None) if chosen is None else chosen
