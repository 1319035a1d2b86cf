"""Compares two graded jobs for `batchgen compare`, after a check that they sat the same exam.

An *exam* is the questions together with the way in which they were asked and marked.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import TYPE_CHECKING

from batchgen.evals.graders.step import MARK
from batchgen.evals.scores.graded_folder import GradedJob, scoring
from batchgen.util.errors import ConfigError
from batchgen.util.text.text_table import number_text, percent_text

if TYPE_CHECKING:
    from batchgen.evals.scores.intervals import Interval
    from batchgen.evals.scores.paired_comparison import Comparison


def compare_jobs(
    jobs: Sequence[GradedJob], overrides: Sequence[str] = (), *, anyway: bool = False
) -> tuple[Comparison, tuple[str, ...]]:
    """Compare two jobs. Returns the comparison, and the differences between their exams, one
    sentence each.

    Raises:
        ConfigError: a job lacks grades, an argument (`score.KEY=…`) is wrong, or the exams differ
            and are not to be compared `anyway`.
    """
    from batchgen.evals.scores.asked_prompts import JobExam, exam_differences
    from batchgen.evals.scores.job_score import job_marks
    from batchgen.evals.scores.paired_comparison import compare

    configs = [scoring(job, overrides).score for job in jobs]
    a, b = (job_marks(job.path, config) for job, config in zip(jobs, configs, strict=True))
    differences = exam_differences(*map(JobExam, jobs))
    if configs[0].cut_texts != configs[1].cut_texts:
        values = " and ".join(config.cut_texts for config in configs)
        differences += (f"texts that were cut count differently (score.cut_texts is {values})",)
    if differences and not anyway:
        names = " and ".join(job.user_path for job in jobs)
        raise ConfigError(
            f"{names} are different exams: {'; '.join(differences)}: --anyway compares them"
        )
    return compare(a, b, bounded=configs[0].column == MARK), differences


def comparison_lines(comparison: Comparison, column: str = MARK) -> list[tuple[str, str]]:
    """The lines of a comparison, each a name and a value; `column` is the scored column."""
    questions = (*comparison.wins, *comparison.ties, *comparison.losses)
    count = len(questions)
    means = (sum(getattr(q, side) for q in questions) / count for side in "ab")
    a, b = (percent_text(mean) if column == MARK else number_text(mean) for mean in means)
    lines = [
        ("questions", f"{count:,} in both{_alone(comparison)}"),
        ("A", a),
        ("B", b),
        ("B − A", f"{_tested(comparison.difference, comparison.p, column)} (new questions)"),
    ]
    if comparison.same_questions is not None:
        assert comparison.same_questions_p is not None
        tested = _tested(comparison.same_questions, comparison.same_questions_p, column)
        lines.append(("", f"{tested} (same questions)"))
    if not math.isnan(comparison.detectable):
        minimum = f"{_size(comparison.detectable, column)}{' points' if column == MARK else ''}"
        lines.append(("noticeable", f"differences of {minimum} or more"))
    wins, ties, losses = (
        f"{len(x):,}" for x in (comparison.wins, comparison.ties, comparison.losses)
    )
    better, worse = ("better", "worse") if column == MARK else ("higher", "lower")
    lines.append(("rows", f"B is {better} in {wins}, equal in {ties}, {worse} in {losses}"))
    return lines


def _alone(comparison: Comparison) -> str:
    alone = {"A": len(comparison.only_a), "B": len(comparison.only_b)}
    return "".join(f", {number:,} only in {job}" for job, number in alone.items() if number)


def _tested(interval: Interval, p: float, column: str) -> str:
    """A difference, of marks in points, with its interval and p where these are known."""
    text = difference(interval.estimate, column) + (" points" if column == MARK else "")
    if math.isnan(p):
        return f"{text}, uncertainty unknown"
    low, high = bound_text(interval.low, column), bound_text(interval.high, column)
    return f"{text}, {low} to {high}, p {p_value(p)}"


def difference(value: float, column: str = MARK) -> str:
    """A difference with its sign: of marks in points, with one digit behind the point."""
    sign = "-" if value < 0 else "+"
    return f"{100 * value:+.1f}" if column == MARK else sign + number_text(abs(value))


def bound_text(value: float, column: str = MARK) -> str:
    """A bound of a difference, with enough digits to show on which side of 0 it is."""
    points = 100 * value
    if column == MARK and abs(points) < 0.05 and round(points, 4):
        return f"{points:+.1g}"
    return difference(value, column)


def _size(value: float, column: str) -> str:
    return f"{100 * value:.1f}" if column == MARK else number_text(value)


def p_value(value: float) -> str:
    """p with three decimals, or with enough to show whether it is below 0.05."""
    if value < 0.001:
        return "< 0.001"
    digits = 3
    while digits < 8 and (round(value, digits) < 0.05) != (value < 0.05):
        digits += 1
    return f"= {value:.{digits}f}"
