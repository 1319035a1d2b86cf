"""Compares two runs of one exam question by question: differences, intervals and tests.

An *exam* is a set of questions with a way of marking the answers; two jobs that differ only in the
model are runs of the same exam. `batchgen compare` prints the result.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple

import numpy as np

from batchgen.evals.scores.intervals import LEVEL, Interval, cluster_se, sample_error
from batchgen.evals.scores.marks import Floats, Ints, Marks
from batchgen.evals.scores.score_metrics import avg_at
from batchgen.evals.scores.student_t import t_cdf, t_quantile
from batchgen.util.errors import ConfigError

POWER = 0.8
"""The share of cases in which a difference of `Comparison.detectable` is found significant."""
_ROUNDING = 1e-12  # a difference below this share of the values comes from rounding: it counts as 0


@dataclass(frozen=True)
class PairedQuestion:
    """A question that has marks in both runs, with its mean mark in run A and in run B."""

    row_id: str
    a: float
    b: float


@dataclass(frozen=True)
class Comparison:
    """The differences B − A of the questions that have marks in both runs.

    A p value is below 0.05 exactly if its 95% interval leaves out 0, because both come from one
    distribution.

    Attributes:
        difference: the mean difference, its paired standard error and its interval for new
            questions, see `paired_difference`.
        p: of a two-sided test that the difference is 0 for new questions. p and the bounds are NaN
            if there is one cluster.
        same_questions: the difference and its interval for the same questions sampled again, which
            shows whether more than chance changed their answers. None if a run has one sample per
            question; the error and the bounds are NaN if in one run all samples of each question
            have equal marks, as copies have.
        same_questions_p: of the test that belongs to `same_questions`; None without it.
        detectable: the smallest true difference that such a comparison would find significant (at
            5%) in four of five cases. NaN if there is one cluster or no question differs, because
            the spread of the differences is then unknown.
        wins, ties, losses: the questions that B answers better, equally and worse than A; wins and
            losses with the largest difference first.
        only_a, only_b: ids of questions that have marks in one run only.
    """

    difference: Interval
    p: float
    same_questions: Interval | None
    same_questions_p: float | None
    detectable: float
    wins: tuple[PairedQuestion, ...]
    ties: tuple[PairedQuestion, ...]
    losses: tuple[PairedQuestion, ...]
    only_a: tuple[str, ...]
    only_b: tuple[str, ...]


def compare(a: Marks, b: Marks, *, bounded: bool = True) -> Comparison:
    """Compare two runs, matching their questions by row id. The clusters are those of A.

    Args:
        bounded: whether marks are from 0 to 1; numbers of other columns are of any size.

    Raises:
        ConfigError: no question has marks in both.
    """
    mean_a, mean_b = question_means(a), question_means(b)
    both = [row_id for row_id in mean_a if row_id in mean_b]
    if not both:
        raise ConfigError("the two jobs have no question with marks in both: nothing to compare")
    index_a = {row_id: index for index, row_id in enumerate(a.row_ids)}
    index_b = {row_id: index for index, row_id in enumerate(b.row_ids)}
    left = a.select([index_a[row_id] for row_id in both])
    right = b.select([index_b[row_id] for row_id in both])
    differences = np.array([mean_b[row_id] - mean_a[row_id] for row_id in both])
    largest = np.array([max(abs(mean_a[row_id]), abs(mean_b[row_id])) for row_id in both])
    differences[np.abs(differences) <= _ROUNDING * largest] = 0.0
    questions = [PairedQuestion(row_id, mean_a[row_id], mean_b[row_id]) for row_id in both]
    order = np.argsort(-np.abs(differences), kind="stable")
    paired = paired_difference(differences, left.clusters, limit=1.0 if bounded else 0.0)
    same = _same_questions(left, right, paired.interval.estimate)
    return Comparison(
        difference=paired.interval,
        p=paired.p,
        same_questions=None if same is None else same.interval,
        same_questions_p=None if same is None else same.p,
        detectable=paired.detectable if differences.any() else math.nan,
        wins=tuple(questions[i] for i in order if differences[i] > 0),
        ties=tuple(questions[i] for i in order if differences[i] == 0),
        losses=tuple(questions[i] for i in order if differences[i] < 0),
        only_a=tuple(row_id for row_id in mean_a if row_id not in mean_b),
        only_b=tuple(row_id for row_id in mean_b if row_id not in mean_a),
    )


@dataclass(frozen=True)
class Tested:
    """A difference with its 95% interval, and the test that belongs to it.

    Attributes:
        p: of the two-sided test that the difference is 0; below 0.05 exactly if the interval leaves
            out 0.
        detectable: the smallest true difference that is found significant (at 5%) in four of five
            cases.
    """

    interval: Interval
    p: float
    detectable: float


def paired_difference(differences: Floats, clusters: Ints, limit: float = 1.0) -> Tested:
    """The mean of paired differences [Q] in clusters [Q], for new questions.

    The paired t test with C − 1 degrees of freedom, after two clusters of mean size were added: one
    that B wins and one that A wins. For right and wrong answers of single questions these are the
    pseudo-observations of Bonett and Price (2012, J. Educ. Behav. Stat. 37, 479; after Agresti and
    Min 2005). Without them the t test calls four questions of 250 significant that all changed in
    one direction, which happens by chance in one of eight such cases. The added clusters differ as
    much as the differing clusters do (their root mean square). If no cluster differs, they differ
    by `limit` per question, so that equal runs do not make the difference certain.

    Args:
        limit: the largest possible difference; 0 if none is known.

    Returns:
        The mean and its standard error without the added clusters, which change only the bounds and
        p. Error, bounds and p are NaN if there is one cluster; so are they if no question differs
        and `limit` is 0.
    """
    mean, se = float(differences.mean()), cluster_se(differences, clusters)
    _, indices = np.unique(clusters, return_inverse=True)
    sizes, sums = np.bincount(indices), np.bincount(indices, differences)
    count = len(sizes)
    if count < 2:
        return _tested(Interval(mean, se, math.nan, math.nan), mean, math.nan, math.nan)
    size = len(differences) / count
    apart = sums[np.abs(sums) > _ROUNDING * np.abs(differences).max()]
    added = math.sqrt(float(np.square(apart).mean())) if len(apart) else limit * size
    total = len(differences) + 2 * size
    centre = float(sums.sum()) / total
    rests = np.append(sums - sizes * centre, [added - size * centre, -added - size * centre])
    error = math.sqrt((count + 2) / (count + 1) * float(np.square(rests).sum())) / total
    return _tested(Interval(mean, se, math.nan, math.nan), centre, error, count - 1)


def unpaired_difference(a: Marks, b: Marks, *, bounded: bool = True) -> Tested:
    """The mean mark of B minus that of A, for two runs that share no question.

    Welch's t test (1947, Biometrika 34, 28) on the means of `cluster_se`, with the degrees of
    freedom of Welch and Satterthwaite. If marks are `bounded` by 0 and 1, a cluster of mean size
    that is right and one that is wrong are added to each run: for single questions this is the
    interval of Agresti and Caffo (2000, Am. Stat. 54, 280). The estimate and its error are without
    the added clusters.
    """
    left, right = _run_mean(a, bounded), _run_mean(b, bounded)
    variance, estimate = left.variance + right.variance, right.mean - left.mean
    interval = Interval(estimate, math.hypot(left.se, right.se), math.nan, math.nan)
    if math.isnan(variance) or variance == 0:
        return _tested(interval, estimate, math.nan, math.nan)
    df = variance**2 / (left.variance**2 / left.df + right.variance**2 / right.df)
    return _tested(interval, right.centre - left.centre, math.sqrt(variance), df)


class _RunMean(NamedTuple):
    """The mean mark of a run.

    Attributes:
        mean: the mean.
        se: its standard error.
        centre: the mean after the clusters were added.
        variance: the variance of `centre`; NaN if there is one cluster.
        df: the degrees of freedom of `variance`.
    """

    mean: float
    se: float
    centre: float
    variance: float
    df: float


def _run_mean(run: Marks, bounded: bool) -> _RunMean:
    """The mean mark of a run, for `unpaired_difference`."""
    means = avg_at(run)
    known = np.isfinite(means)
    values, clusters = means[known], run.clusters[known]
    _, indices = np.unique(clusters, return_inverse=True)
    sizes, sums = np.bincount(indices).astype(np.float64), np.bincount(indices, values)
    count, size = len(sizes), len(values) / len(sizes)
    mean, se = float(values.mean()), cluster_se(values, clusters)
    if count < 2 or not bounded:
        return _RunMean(mean, se, mean, se**2, count - 1)
    sizes, sums = np.append(sizes, [size, size]), np.append(sums, [size, 0.0])
    centre = float(sums.sum() / sizes.sum())
    squares, number = float(np.square(sums - sizes * centre).sum()), len(sizes)
    variance = number / (number - 1) * squares / float(sizes.sum()) ** 2
    return _RunMean(mean, se, centre, variance, count - 1)


def _tested(interval: Interval, centre: float, error: float, df: float) -> Tested:
    """The estimate with the bounds centre ± t·error and the p value of centre / error. All are NaN
    if the error is NaN or 0."""
    if math.isnan(error) or error == 0:
        return Tested(replace(interval, low=math.nan, high=math.nan), math.nan, math.nan)
    t = t_quantile((1 + LEVEL) / 2, df)
    p = 2 * t_cdf(-abs(centre) / error, df)
    bounds = replace(interval, low=centre - t * error, high=centre + t * error)
    return Tested(bounds, p, (t + t_quantile(POWER, df)) * error)


@dataclass(frozen=True)
class Exam:
    """The exam of a run: row id → a digest of the prompt, and row id → target.

    Two runs are the same exam if these are equal for all rows that both have.
    """

    prompts: Mapping[str, str]
    targets: Mapping[str, str | None]


def row_differences(a: Exam, b: Exam) -> tuple[str, ...]:
    """The differences between two exams, one sentence each.

    Rows that only one run has are no difference: `Comparison` lists them.
    """
    differences = []
    for what, left, right in (("prompt", a.prompts, b.prompts), ("target", a.targets, b.targets)):
        rows = [row_id for row_id in left if row_id in right and left[row_id] != right[row_id]]
        if rows:
            differences.append(
                f"{len(rows)} of {len(left)} rows have another {what} ({_first(rows)})"
            )
    return tuple(differences)


def _first(rows: Sequence[str]) -> str:
    return ", ".join(rows[:3]) + (", …" if len(rows) > 3 else "")


def question_means(marks: Marks) -> dict[str, float]:
    """The mean mark of each question that has one."""
    pairs = zip(marks.row_ids, avg_at(marks), strict=True)
    return {row_id: float(mean) for row_id, mean in pairs if math.isfinite(mean)}


def _same_questions(a: Marks, b: Marks, mean: float) -> Tested | None:
    """The difference for the same questions: Welch's test, with the errors of `sample_error`."""
    left, right = sample_error(a), sample_error(b)
    if left is None or right is None:
        return None
    both = left + right
    varies = left.variance > 0 and right.variance > 0
    se = math.sqrt(both.variance) if varies else math.nan
    return _tested(Interval(mean, se, math.nan, math.nan), mean, se, both.df)
