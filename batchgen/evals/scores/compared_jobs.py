"""Compares two graded jobs, after it has made sure that they are one exam."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import TYPE_CHECKING

from batchgen.evals.scores.graded_folder import GradedJob, scoring
from batchgen.util.errors import ConfigError

if TYPE_CHECKING:
    from batchgen.evals.scores.intervals import Interval
    from batchgen.evals.scores.paired_comparison import Comparison


def compared(
    jobs: Sequence[GradedJob], overrides: Sequence[str] = (), *, anyway: bool = False
) -> tuple[Comparison, tuple[str, ...]]:
    """Compare two jobs, and say what makes them different exams, a sentence each.

    Raises:
        ConfigError: a job lacks grades, an argument (`score.KEY=…`) is wrong, or they are different
            exams and not to be compared `anyway`.
    """
    from batchgen.evals.scores.job_score import job_marks
    from batchgen.evals.scores.paired_comparison import compare

    configs = [scoring(job, overrides).score for job in jobs]
    a, b = (job_marks(job.path, config) for job, config in zip(jobs, configs, strict=True))
    found = _differences(jobs)
    if configs[0].cut_texts != configs[1].cut_texts:
        values = " and ".join(config.cut_texts for config in configs)
        found += (f"texts that were cut count differently (score.cut_texts is {values})",)
    if found and not anyway:
        names = " and ".join(job.given for job in jobs)
        raise ConfigError(f"{names} are not one exam: {'; '.join(found)}: --anyway compares them")
    return compare(a, b), found


def _differences(jobs: Sequence[GradedJob]) -> tuple[str, ...]:
    """What makes two jobs different exams, a sentence each."""
    from batchgen.evals.scores.asked_prompts import prompt_digests
    from batchgen.evals.scores.job_score import job_targets
    from batchgen.evals.scores.paired_comparison import Exam, exam_differences

    prompts = prompt_digests(jobs)
    targets = [job_targets(job.path) for job in jobs]
    exams = [Exam(p, t) for p, t in zip(prompts, targets, strict=True)]
    return exam_differences(*exams)


def comparison_lines(found: Comparison) -> list[tuple[str, str]]:
    """A name and a value for each line that tells what a comparison found."""
    questions = (*found.wins, *found.ties, *found.losses)
    count = len(questions)
    a, b = (sum(getattr(q, side) for q in questions) / count for side in "ab")
    lines = [
        ("questions", f"{count:,} in both{_alone(found)}"),
        ("A", f"{100 * a:.1f}%"),
        ("B", f"{100 * b:.1f}%"),
        ("B − A", f"{_tested(found.difference, found.p)} (new questions)"),
    ]
    if found.same_questions is not None:
        assert found.same_questions_p is not None
        tested = _tested(found.same_questions, found.same_questions_p)
        lines.append(("", f"{tested} (same questions)"))
    if not math.isnan(found.detectable):
        lines.append(("noticeable", f"differences of {100 * found.detectable:.1f} points or more"))
    wins, ties, losses = (f"{len(x):,}" for x in (found.wins, found.ties, found.losses))
    lines.append(("rows", f"B is better in {wins}, equal in {ties}, worse in {losses}"))
    return lines


def _alone(found: Comparison) -> str:
    alone = {"A": len(found.only_a), "B": len(found.only_b)}
    return "".join(f", {number:,} only in {job}" for job, number in alone.items() if number)


def _tested(interval: Interval, p: float) -> str:
    """A difference in points, with its interval and p where these can be told."""
    difference = f"{100 * interval.estimate:+.1f} points"
    if math.isnan(p):
        return f"{difference}, how sure cannot be told"
    low, high = _bound(100 * interval.low), _bound(100 * interval.high)
    return f"{difference}, {low} to {high}, p {_p(p)}"


def _bound(points: float) -> str:
    """A bound with a digit behind the point, or as many as show on which side of 0 it lies."""
    return f"{points:+.1f}" if abs(points) >= 0.05 or not round(points, 4) else f"{points:+.1g}"


def _p(value: float) -> str:
    """p with three digits behind the point, or as many as show whether it is below 0.05."""
    if value < 0.001:
        return "< 0.001"
    digits = 3
    while digits < 8 and (round(value, digits) < 0.05) != (value < 0.05):
        digits += 1
    return f"= {value:.{digits}f}"
