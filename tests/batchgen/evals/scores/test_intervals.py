"""Intervals against closed forms, scipy and simulation."""

import math
from collections.abc import Callable

import numpy as np
import pytest
from scipy import stats

from batchgen.evals.scores.intervals import (
    Interval,
    cluster_se,
    mean_interval,
    population_interval,
    same_questions_interval,
)
from batchgen.evals.scores.marks import Floats, Marks, Sample
from batchgen.evals.scores.student_t import t_cdf, t_quantile
from batchgen.util.random_bits import random_words


@pytest.mark.parametrize("df", [1, 2, 3, 7, 29, 197, 1318, 1e5, 1e9])
@pytest.mark.parametrize("p", [0.005, 0.025, 0.2, 0.8, 0.95, 0.975, 0.9995])
def test_quantiles_of_t(p: float, df: float) -> None:
    assert t_quantile(p, df) == pytest.approx(stats.t.ppf(p, df), rel=1e-7)


@pytest.mark.parametrize("t", [-30.0, -2.0, -0.1, 0.0, 0.5, 3.0])
@pytest.mark.parametrize("df", [1, 4, 30, 1000])
def test_distribution_of_t(t: float, df: float) -> None:
    assert t_cdf(t, df) == pytest.approx(stats.t.cdf(t, df), rel=1e-8)


def test_words_are_those_of_splitmix64() -> None:
    """The first numbers of the generator's published sequence for the seed 1234567."""
    assert list(random_words(1234567, (3,))) == [
        6457827717110365317,
        3203168211198807973,
        9817491932198370423,
    ]
    assert list(random_words(1234567, (2,), start=1)) == list(random_words(1234567, (3,))[1:])


def test_random_numbers_are_spread_evenly() -> None:
    counts = np.bincount((random_words(3, (70_000,)) % 7).astype(int), minlength=7)
    assert stats.chisquare(counts).pvalue > 1e-3


def test_error_without_clusters_is_that_of_a_mean() -> None:
    values = np.array([0.0, 0.25, 1.0, 0.5, 0.75, 1.0])
    assert cluster_se(values, np.arange(6)) == pytest.approx(stats.sem(values))


def test_error_with_clusters() -> None:
    """Miller's formula, written out by hand: two clusters of two and one of one."""
    values = np.array([1.0, 1.0, 0.0, 1.0, 0.0])
    deviations = [2 * 0.4, 0.4 - 0.6, -0.6]
    wanted = math.sqrt(3 / 2 * sum(d * d for d in deviations)) / 5
    assert cluster_se(values, np.array([0, 0, 1, 1, 2])) == pytest.approx(wanted)


def test_one_copy_of_every_question_makes_an_interval_no_shorter() -> None:
    values, clusters = np.array([0.1, 0.9, 0.4, 0.6]), np.arange(4)
    twice = population_interval(np.tile(values, 2), np.tile(clusters, 2))
    once = population_interval(values, clusters)
    assert once is not None and twice is not None
    assert twice.se == pytest.approx(once.se) and twice.low == pytest.approx(once.low)


def test_population_interval_is_the_delta_method_on_log_odds() -> None:
    values = np.random.default_rng(0).beta(3, 2, 40)
    found = population_interval(values, np.arange(40))
    assert found is not None
    mean, se = values.mean(), stats.sem(values)
    assert found.estimate == pytest.approx(mean) and found.se == pytest.approx(se)
    reach = stats.t.ppf(0.975, 39) * se / (mean * (1 - mean))
    odds = math.log(mean / (1 - mean))
    assert found.low == pytest.approx(stats.logistic.cdf(odds - reach))
    assert found.high == pytest.approx(stats.logistic.cdf(odds + reach))


@pytest.mark.parametrize(("mean", "inside"), [(0.0, 0.1), (1.0, 0.9)])
def test_all_right_or_all_wrong_is_not_certain(mean: float, inside: float) -> None:
    found = population_interval(np.full(30, mean), np.arange(30))
    assert found is not None and found.low <= min(mean, inside) and found.high >= max(mean, inside)


def test_the_interval_of_marks_stays_between_0_and_1() -> None:
    for count in range(2, 200):
        for mean in (0.0, 1.0):
            interval = population_interval(np.full(count, mean), np.arange(count))
            assert interval is not None and 0 <= interval.low <= interval.high <= 1


@pytest.mark.parametrize("mean", [0.0, 1 / 3, 0.5, 0.7, 1.0])
@pytest.mark.parametrize("count", [2, 3, 30])
def test_equal_questions_are_not_certain(mean: float, count: int) -> None:
    """Wilson's bounds are the roots of (p − mean)² = t²·p(1 − p)/count."""
    values = np.full(3 * count, mean)
    values[:count], values[count : 2 * count] = mean * 0.9, mean * 1.1  # each cluster has the mean
    found = population_interval(values, np.tile(np.arange(count), 3))
    assert found is not None and found.se == 0 and found.estimate == pytest.approx(mean)
    share = stats.t.ppf(0.975, count - 1) ** 2 / count
    low, high = sorted(np.roots([1 + share, -2 * mean - share, mean**2]))
    assert (found.low, found.high) == pytest.approx((low, high), abs=1e-9)


def test_equal_numbers_have_no_bounds_whatever_their_rounding() -> None:
    found = mean_interval(np.full(3, 0.1), np.arange(3))
    assert found is not None and found.se == 0 and math.isnan(found.low)
    copies = Marks.of(
        [Sample(str(q), k, -1234.567 * (q + 1), "x") for q in range(3) for k in range(3)],
        bounded=False,
    )
    same = same_questions_interval(copies, bounded=False)
    assert same is not None and math.isnan(same.low)


def test_the_spread_of_small_numbers_counts() -> None:
    small = Marks.of(
        [Sample("q", k, mark, "x") for k, mark in enumerate((1e-8, 3e-8))], bounded=False
    )
    found = same_questions_interval(small, bounded=False)
    assert found is not None and found.se == pytest.approx(1e-8)


def test_nothing_known_has_no_interval() -> None:
    assert population_interval(np.array([np.nan]), np.array([0])) is None
    one = population_interval(np.array([0.5]), np.array([0]))
    assert one is not None and one.estimate == 0.5 and math.isnan(one.low)


def marks_of(rows: Floats) -> Marks:
    return Marks.of(
        Sample(str(q), k, float(mark), str(mark))
        for q, row in enumerate(rows)
        for k, mark in enumerate(row)
        if np.isfinite(mark)
    )


def test_same_questions_error_is_the_closed_form() -> None:
    rows = np.random.default_rng(0).integers(0, 2, (50, 8)).astype(float)
    p = rows.mean(1)
    found = same_questions_interval(marks_of(rows))
    assert found is not None
    assert found.se == pytest.approx(math.sqrt((p * (1 - p) / 7).sum()) / 50)


def test_same_questions_with_one_sample_each_say_nothing() -> None:
    assert same_questions_interval(marks_of(np.array([[1.0], [0.0]]))) is None


def test_a_question_with_one_mark_gets_the_mean_variance() -> None:
    found = same_questions_interval(marks_of(np.array([[1.0, 0.0], [1.0, np.nan]])))
    assert found is not None and found.se == pytest.approx(math.sqrt(0.5 / 2 + 0.5) / 2)


def test_figures_of_the_known_exams() -> None:
    """GPQA: 198 questions, 4 samples at 0.84; AIME: 30 questions, 32 samples at 0.89."""
    for n, k, mean in ((198, 4, 0.84), (30, 32, 0.89)):
        right = round(n * mean)
        decided = np.repeat([[1.0], [0.0]], [right, n - right], axis=0) * np.ones(k)
        found = population_interval(decided.mean(1), np.arange(n))
        assert found is not None
        assert found.se == pytest.approx(math.sqrt(mean * (1 - mean) / (n - 1)), rel=0.1)


Draw = Callable[[np.random.Generator], tuple[Floats, float]]


def beta_binomial(n: int, k: int, a: float, b: float) -> Draw:
    def draw(rng: np.random.Generator) -> tuple[Floats, float]:
        return rng.binomial(k, rng.beta(a, b, n)) / k, a / (a + b)

    return draw


def binomial(n: int, k: int, p: float) -> Draw:
    return lambda rng: (rng.binomial(k, p, n) / k, p)


def coverage(draw: Draw, interval: Callable[[Floats], Interval | None], times: int) -> float:
    rng = np.random.default_rng(0)
    held = 0
    for _ in range(times):
        values, truth = draw(rng)
        found = interval(values)
        assert found is not None
        held += found.low <= truth <= found.high
    return held / times


@pytest.mark.quick(2)
@pytest.mark.parametrize(
    "draw",
    [
        binomial(198, 4, 0.84),
        binomial(30, 32, 0.9),
        binomial(500, 1, 0.7),
        beta_binomial(198, 4, 0.84, 0.16),
        beta_binomial(198, 4, 4.2, 0.8),
        beta_binomial(30, 32, 5, 5),
        beta_binomial(30, 8, 1.6, 0.4),
        beta_binomial(1319, 1, 0.6, 0.4),
    ],
)
def test_population_interval_holds_the_truth_in_95_of_100_cases(draw: Draw) -> None:
    found = coverage(draw, lambda v: population_interval(v, np.arange(len(v))), 1200)
    assert 0.93 <= found <= 0.97


def test_clustered_interval_holds_the_truth_in_95_of_100_cases() -> None:
    """Forty texts with 1 to 6 questions each; questions about a text are alike."""

    def draw(rng: np.random.Generator) -> tuple[Floats, float]:
        return rng.beta(2.1, 0.9, 40), 0.7

    def interval(texts: Floats) -> Interval | None:
        sizes = np.arange(40) % 6 + 1
        rng = np.random.default_rng(int(texts[0] * 2**40))
        clusters = np.repeat(np.arange(40), sizes)
        return population_interval((rng.random(sizes.sum()) < texts[clusters]) * 1.0, clusters)

    assert 0.93 <= coverage(draw, interval, 1500) <= 0.97


@pytest.mark.quick(1)
@pytest.mark.parametrize("k", [1, 8, 64])
@pytest.mark.parametrize("n", [30, 198, 500])
def test_population_interval_at_sizes_of_known_exams(n: int, k: int) -> None:
    """Questions that are alike, that differ, and that are nearly always right or always wrong."""
    found = [
        coverage(beta_binomial(n, k, a, b), lambda v: population_interval(v, np.arange(n)), 500)
        for a, b in ((50, 50), (4, 1), (0.8, 0.2), (9, 1))
    ]
    assert 0.935 <= np.mean(found) <= 0.985  # 2000 cases: one standard error is 0.005
    assert min(found) >= 0.92


def test_population_interval_of_a_nearly_solved_exam() -> None:
    """What the docstring says of 30 questions with 64 samples at 0.95, no less and no more."""
    draw = beta_binomial(30, 64, 0.95, 0.05)
    found = coverage(draw, lambda v: population_interval(v, np.arange(len(v))), 1500)
    assert 0.86 <= found <= 0.91


def sampled(rng: np.random.Generator, p: Floats, k: int) -> Marks:
    rows = (rng.random((len(p), k)) < p[:, None]).astype(np.float64)
    codes = np.zeros((len(p), k), np.int64)
    ids = tuple(map(str, range(len(p))))
    alone = np.arange(len(p))
    return Marks(
        ids, rows, codes, codes, codes == 0, (None,) * len(p), alone, np.full(len(alone), np.nan)
    )


@pytest.mark.thorough
@pytest.mark.parametrize(
    ("n", "k", "a", "b"),
    [
        (198, 4, 4.2, 0.8),
        pytest.param(30, 32, 8.9, 1.1, marks=pytest.mark.slow),
        pytest.param(30, 4, 1, 1, marks=pytest.mark.slow),
        (30, 2, 4, 1),
        pytest.param(30, 8, 9.5, 0.5, marks=pytest.mark.slow),
        (30, 64, 0.95, 0.05),
        pytest.param(198, 2, 0.95, 0.05, marks=pytest.mark.slow),
        (500, 8, 0.8, 0.2),
    ],
)
def test_same_questions_interval_holds_the_truth_in_95_of_100_cases(
    n: int, k: int, a: float, b: float
) -> None:
    rng = np.random.default_rng(1)
    p = rng.beta(a, b, n)
    held = told = 0
    for _ in range(400):
        found = same_questions_interval(sampled(rng, p, k))
        assert found is not None
        told += not math.isnan(found.low)
        held += found.low <= p.mean() <= found.high
    assert told > 380 and 0.93 <= held / told <= 0.995


@pytest.mark.parametrize("rows", [np.ones((30, 4)), np.repeat([[1.0], [0.0]], 4, axis=1)])
def test_copies_do_not_make_a_score_certain(rows: Floats) -> None:
    found = same_questions_interval(marks_of(rows))
    assert found is not None and math.isnan(found.se) and math.isnan(found.low)
    assert found.estimate == rows.mean()


def test_equal_fractions_that_do_not_sum_exactly_are_copies() -> None:
    found = same_questions_interval(marks_of(np.full((20, 7), 0.1)))
    assert found is not None and math.isnan(found.low)
