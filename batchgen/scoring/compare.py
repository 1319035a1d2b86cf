"""Two runs of one exam, question by question."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import product

import numpy as np

from batchgen.errors import ConfigError
from batchgen.scoring.intervals import LEVEL, Interval, cluster_se, same_questions_interval
from batchgen.scoring.marks import Floats, Ints, Marks
from batchgen.scoring.metrics import avg_at
from batchgen.scoring.random_bits import random_signs
from batchgen.scoring.student_t import t_cdf, t_quantile

POWER = 0.8
_EXACT = 14
"""With at most so many clusters that differ, all flips are tried."""
_DRAWS = 20_000
_CHUNK = 2_000_000
_ROUNDING = 1e-12


@dataclass(frozen=True)
class Question:
    """A question that both runs have marks for: the mean marks in A and B."""

    row_id: str
    a: float
    b: float


@dataclass(frozen=True)
class Comparison:
    """B minus A over the questions that both have marks for.

    Attributes:
        difference: the mean difference, its paired standard error and its interval for new
            questions (t quantiles). NaN where there is one cluster.
        same_questions: the same for the same questions sampled again: it tells whether anything but
            chance changed in how these are answered. None if a run has one sample per question.
        p: how often flipping the signs of questions (of clusters, if there are) gives a mean at
            least as far from 0 (two-sided sign-flip permutation test). It is exact with few
            differing clusters and else from 20,000 seeded draws.
        same_questions_p: of a test with `same_questions`; None without it.
        detectable: the smallest true difference that a comparison like this one would notice (at
            5%) in four of five cases. NaN where there is one cluster, or no question differs: how
            far differences scatter is then not known.
        wins, ties, losses: the questions that B answers better, equally and worse than A; wins and
            losses with the largest difference first.
        only_a, only_b: ids of questions that one run has no mark for.
    """

    difference: Interval
    same_questions: Interval | None
    p: float
    same_questions_p: float | None
    detectable: float
    wins: tuple[Question, ...]
    ties: tuple[Question, ...]
    losses: tuple[Question, ...]
    only_a: tuple[str, ...]
    only_b: tuple[str, ...]


def compare(a: Marks, b: Marks, seed: int = 0) -> Comparison:
    """Compare two runs by the ids of their rows. Clusters are those of A.

    Raises:
        ConfigError: no question has marks in both.
    """
    mean_a, mean_b = _means(a), _means(b)
    both = [row_id for row_id in mean_a if row_id in mean_b]
    if not both:
        raise ConfigError("the two jobs have no question with marks in both: nothing to compare")
    place_a = {row_id: place for place, row_id in enumerate(a.row_ids)}
    place_b = {row_id: place for place, row_id in enumerate(b.row_ids)}
    left = a.select([place_a[row_id] for row_id in both])
    right = b.select([place_b[row_id] for row_id in both])
    differences = np.array([mean_b[row_id] - mean_a[row_id] for row_id in both])
    differences[np.abs(differences) < _ROUNDING] = 0.0
    questions = [Question(row_id, mean_a[row_id], mean_b[row_id]) for row_id in both]
    order = np.argsort(-np.abs(differences), kind="stable")
    mean, se = float(differences.mean()), cluster_se(differences, left.clusters)
    df = len(np.unique(left.clusters)) - 1
    t = t_quantile((1 + LEVEL) / 2, df) if df else math.nan
    same = _same_questions(left, right, mean)
    return Comparison(
        difference=Interval(mean, se, mean - t * se, mean + t * se),
        same_questions=same,
        p=sign_flip_p(differences, left.clusters, seed),
        same_questions_p=None if same is None else _normal_p(mean, same.se),
        detectable=(t + t_quantile(POWER, df)) * se if df and se else math.nan,
        wins=tuple(questions[i] for i in order if differences[i] > 0),
        ties=tuple(questions[i] for i in order if differences[i] == 0),
        losses=tuple(questions[i] for i in order if differences[i] < 0),
        only_a=tuple(row_id for row_id in mean_a if row_id not in mean_b),
        only_b=tuple(row_id for row_id in mean_b if row_id not in mean_a),
    )


def sign_flip_p(differences: Floats, clusters: Ints, seed: int = 0) -> float:
    """The two-sided p value of a sign-flip permutation test of differences [Q] in clusters [Q].

    The differences of a cluster are flipped together. Clusters without a difference have no part.
    """
    _, places = np.unique(clusters, return_inverse=True)
    sums = np.bincount(places, differences)
    sums = sums[np.abs(sums) > _ROUNDING]
    wanted = abs(float(sums.sum())) - _ROUNDING * len(differences)
    if not len(sums):
        return 1.0
    if len(sums) <= _EXACT:
        signs = np.array(list(product((-1.0, 1.0), repeat=len(sums))))
        return float((np.abs(signs @ sums) >= wanted).mean())
    rows = max(1, _CHUNK // len(sums))
    reached = 0
    for start in range(0, _DRAWS, rows):
        shape = (min(rows, _DRAWS - start), len(sums))
        drawn = random_signs(seed, shape, start * len(sums)) @ sums
        reached += int((np.abs(drawn) >= wanted).sum())
    return (1 + reached) / (1 + _DRAWS)


@dataclass(frozen=True)
class Exam:
    """What a run asked: for each row id a digest of its prompt, and its target.

    Two runs are the same exam if these are equal for all rows that both have.
    """

    prompts: Mapping[str, str]
    targets: Mapping[str, str | None]


def exam_differences(a: Exam, b: Exam) -> tuple[str, ...]:
    """What differs between two exams, a sentence each; empty if nothing does.

    Rows that only one run has are no difference: `Comparison` lists them.
    """
    found = []
    for what, left, right in (("prompt", a.prompts, b.prompts), ("target", a.targets, b.targets)):
        rows = [row_id for row_id in left if row_id in right and left[row_id] != right[row_id]]
        if rows:
            found.append(
                f"{len(rows)} of {len(left)} rows have another {what} ({_first(rows)}): the scores "
                "are not of one exam"
            )
    return tuple(found)


def _first(rows: Sequence[str]) -> str:
    return ", ".join(rows[:3]) + (", …" if len(rows) > 3 else "")


def _means(marks: Marks) -> dict[str, float]:
    """The mean mark of each question that has one."""
    pairs = zip(marks.row_ids, avg_at(marks), strict=True)
    return {row_id: float(mean) for row_id, mean in pairs if math.isfinite(mean)}


def _same_questions(a: Marks, b: Marks, mean: float) -> Interval | None:
    left, right = same_questions_interval(a), same_questions_interval(b)
    if left is None or right is None:
        return None
    se = math.hypot(left.se, right.se)
    reach = t_quantile((1 + LEVEL) / 2, math.inf) * se
    return Interval(mean, se, mean - reach, mean + reach)


def _normal_p(mean: float, se: float) -> float:
    if se == 0:
        return float(mean == 0)
    return 2 * t_cdf(-abs(mean) / se, math.inf)
