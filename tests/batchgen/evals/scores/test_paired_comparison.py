"""The comparison of two runs."""

import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from scipy import stats

from batchgen.evals.scores.marks import Floats, Ints, Marks, Sample
from batchgen.evals.scores.paired_comparison import (
    Exam,
    compare,
    paired_difference,
    row_differences,
    unpaired_difference,
)
from batchgen.util.errors import ConfigError


def run(rows: Floats, ids: str | None = None, cluster_of: int | None = None) -> Marks:
    """Marks [Q, K]; question q has the id ids[q], or its number."""
    return Marks.of(
        Sample(
            ids[q] if ids else str(q),
            k,
            float(mark),
            str(mark),
            cluster=None if cluster_of is None else str(q // cluster_of),
        )
        for q, row in enumerate(rows)
        for k, mark in enumerate(row)
    )


def two_runs(n: int, k: int, seed: int = 0) -> tuple[Floats, Floats]:
    rng = np.random.default_rng(seed)
    p = rng.beta(4, 1, (n, 1))
    a, b = rng.random((n, k)) < p, rng.random((n, k)) < np.minimum(p + 0.05, 1)
    return a.astype(np.float64), b.astype(np.float64)


def test_paired_figures_are_those_of_a_t_test_with_two_questions_more() -> None:
    a, b = two_runs(60, 4)
    found = compare(run(a), run(b))
    d = b.mean(1) - a.mean(1)
    assert found.difference.estimate == pytest.approx(d.mean())
    assert found.difference.se == pytest.approx(stats.sem(d))
    added = math.sqrt(np.square(d[d != 0]).mean())
    more = np.append(d, [added, -added])
    assert found.p == pytest.approx(2 * stats.t.sf(abs(more.mean()) / stats.sem(more), 59))
    reach = stats.t.ppf(0.975, 59) * stats.sem(more)
    assert found.difference.low == pytest.approx(more.mean() - reach)
    assert found.difference.high == pytest.approx(more.mean() + reach)
    t = stats.t.ppf(0.975, 59) + stats.t.ppf(0.8, 59)
    assert found.detectable == pytest.approx(t * stats.sem(more))


@pytest.mark.parametrize(("b", "c", "n"), [(4, 0, 250), (12, 5, 80), (0, 0, 40), (3, 3, 6)])
def test_right_and_wrong_have_the_interval_of_bonett_and_price(b: int, c: int, n: int) -> None:
    """With t quantiles in place of normal ones, and the variance of a sample."""
    d = np.zeros(n)
    d[:b], d[b : b + c] = -1, 1
    found = paired_difference(d, np.arange(n)).interval
    share_b, share_c = (b + 1) / (n + 2), (c + 1) / (n + 2)
    variance = (share_b + share_c - (share_c - share_b) ** 2) / (n + 1)
    reach = stats.t.ppf(0.975, n - 1) * math.sqrt(variance)
    assert found.low == pytest.approx(share_c - share_b - reach)
    assert found.high == pytest.approx(share_c - share_b + reach)
    assert found.estimate == pytest.approx((c - b) / n)


def test_same_questions_figures_are_the_closed_form() -> None:
    a, b = two_runs(60, 4)
    comparison = compare(run(a), run(b))
    found, p = comparison.same_questions, comparison.same_questions_p
    parts = np.concatenate([m.mean(1) * (1 - m.mean(1)) / 3 for m in (a, b)])
    assert found is not None and found.se == pytest.approx(math.sqrt(parts.sum()) / 60)
    df = parts.sum() ** 2 / (np.square(parts).sum() / 3)
    assert p == pytest.approx(2 * stats.t.sf(abs(found.estimate) / found.se, df), rel=1e-6)
    assert found.high == pytest.approx(found.estimate + stats.t.ppf(0.975, df) * found.se)
    assert compare(run(a[:, :1]), run(b[:, :1])).same_questions_p is None


def test_copies_do_not_make_a_difference_certain() -> None:
    """Four answers at temperature 0: the same questions were asked once, not four times."""
    a, b = (np.repeat(m[:, :1], 4, axis=1) for m in two_runs(60, 4))
    found = compare(run(a), run(b))
    assert found.same_questions is not None and math.isnan(found.same_questions.low)
    assert found.same_questions_p is not None and math.isnan(found.same_questions_p)
    assert 0 < found.p < 1
    sampled, _ = two_runs(60, 4, seed=1)
    one_side = compare(run(a), run(sampled))
    assert one_side.same_questions_p is not None and math.isnan(one_side.same_questions_p)


@given(
    st.lists(st.integers(-8, 8), min_size=2, max_size=60),
    st.integers(1, 4),
)
def test_p_is_below_5_percent_exactly_where_the_interval_leaves_out_0(
    eighths: list[int], of_cluster: int
) -> None:
    found = paired_difference(np.array(eighths) / 8, np.arange(len(eighths)) // of_cluster)
    if math.isnan(found.p):
        assert len(eighths) <= of_cluster and math.isnan(found.interval.low)
        return
    assert 0 <= found.p <= 1
    outside = found.interval.low > 0 or found.interval.high < 0
    assert outside == (found.p < 0.05)
    assert found.interval.low <= found.interval.estimate <= found.interval.high


@pytest.mark.parametrize("seed", range(3))
def test_p_and_interval_agree_for_the_same_questions(seed: int) -> None:
    for n in (10, 30, 60, 120):
        found = compare(*map(run, two_runs(n, 6, seed)))
        same, p = found.same_questions, found.same_questions_p
        assert same is not None and p is not None
        assert (p < 0.05) == (same.low > 0 or same.high < 0)


@pytest.mark.quick(20)
@pytest.mark.parametrize("n", [30, 198, 500])
@pytest.mark.parametrize("differ", range(1, 31))
def test_few_differing_questions_are_seldom_significant(n: int, differ: int) -> None:
    """The exact size where this many questions differ, each for A or for B with equal chance.

    McNemar's exact test is at most 0.05, and the paired t test at 4 questions 0.125.
    """
    size = 0.0
    for wins in range(differ + 1):
        d = np.zeros(n)
        d[:wins], d[wins:differ] = 1, -1
        significant = paired_difference(d, np.arange(n)).p < 0.05
        size += stats.binom.pmf(wins, differ, 0.5) * significant
    assert size <= 0.065
    assert differ > 5 or size == 0


@pytest.mark.quick(1)
@pytest.mark.parametrize(
    ("n", "k"),
    [
        pytest.param(n, k, marks=[] if i == j else [pytest.mark.slow])
        for i, n in enumerate([30, 198, 500])
        for j, k in enumerate([1, 8, 64])
    ],
)
def test_differences_for_new_questions_by_simulation(n: int, k: int) -> None:
    """B answers each question right with a chance that is higher by at most `shift`."""
    rng = np.random.default_rng(n + k)
    held, significant = [], []
    for a, b in ((4, 1), (0.8, 0.2), (19, 1)):
        for shift in (0.0, 0.04):
            p = rng.beta(a, b, 200_000)
            truth = float((np.minimum(p + shift, 1) - p).mean())
            p = rng.beta(a, b, (500, n))
            d = (rng.binomial(k, np.minimum(p + shift, 1)) - rng.binomial(k, p)) / k
            found = [paired_difference(one, np.arange(n)) for one in d]
            held += [f.interval.low <= truth <= f.interval.high for f in found]
            significant += [f.p < 0.05 for f in found if shift == 0]
    assert np.mean(held) >= 0.94  # 3000 cases: one standard error is 0.004
    assert np.mean(significant) <= 0.065  # 1500 cases: one standard error is 0.006


@pytest.mark.thorough
def test_size_of_p_for_the_same_questions() -> None:
    rng = np.random.default_rng(0)
    significant = []
    for n, k in ((30, 2), (30, 8), (30, 64), (198, 8)):
        p, codes, ids = rng.beta(4, 1, n), np.zeros((n, k), np.int64), tuple(map(str, range(n)))

        def drawn(p: Floats, codes: Ints, ids: tuple[str, ...]) -> Marks:
            rows = rng.binomial(1, p[:, None], codes.shape).astype(np.float64)
            alone, none = np.arange(len(ids)), (None,) * len(ids)
            chance = np.full(len(ids), np.nan)
            return Marks(ids, rows, codes, codes, codes == 0, none, alone, chance)

        runs = [(drawn(p, codes, ids), drawn(p, codes, ids)) for _ in range(300)]
        found = [compare(*pair).same_questions_p for pair in runs]
        significant += [p is not None and p < 0.05 for p in found]
    assert np.mean(significant) <= 0.065  # 1200 cases: one standard error is 0.006


def test_few_questions_of_one_cluster_are_one_observation() -> None:
    differences = np.full(8, 0.5)
    alone = paired_difference(differences, np.arange(8))
    pairs = paired_difference(differences, np.arange(8) // 4)
    assert alone.p < 0.05 < pairs.p
    one = paired_difference(differences, np.zeros(8, np.int64))
    assert math.isnan(one.p) and math.isnan(one.interval.low) and one.interval.estimate == 0.5


def test_equal_runs_do_not_differ() -> None:
    a, _ = two_runs(30, 4)
    found = compare(run(a), run(a))
    assert found.p == 1 and found.difference.estimate == 0 and len(found.ties) == 30
    assert found.difference.low < -0.02 and found.difference.high > 0.02  # 30 say little
    assert math.isnan(found.detectable)
    assert not found.wins and not found.losses


def test_questions_are_joined_by_id() -> None:
    a = run(np.array([[1.0, 1.0], [0.0, 0.0], [1.0, 0.0], [0.0, 0.0]]), "pqrx")
    b = run(np.array([[1.0, 1.0], [1.0, 0.0], [0.0, 0.0], [1.0, 1.0]]), "rqpy")
    found = compare(a, b)
    assert [(q.row_id, q.a, q.b) for q in found.wins] == [("q", 0.0, 0.5), ("r", 0.5, 1.0)]
    assert [q.row_id for q in found.losses] == ["p"]
    assert (found.only_a, found.only_b) == (("x",), ("y",))


def test_runs_without_a_common_question_are_refused() -> None:
    with pytest.raises(ConfigError, match="no question"):
        compare(run(np.ones((1, 1)), "a"), run(np.ones((1, 1)), "b"))


def test_clusters_widen_the_interval() -> None:
    rng = np.random.default_rng(0)
    shift = np.repeat(rng.random((10, 1)) < 0.5, 6, axis=0)
    a, b = np.zeros((60, 2)), shift * np.ones(2)
    alone, together = compare(run(a), run(b)), compare(run(a, cluster_of=6), run(b))
    assert together.difference.se > 2 * alone.difference.se and together.p > alone.p


def test_equal_numbers_of_unpaired_runs_have_no_p() -> None:
    a, b = (
        Marks.of([Sample(f"{x}{q}", 0, x, "x") for q in range(3)], bounded=False)
        for x in (0.1, 0.3)
    )
    found = unpaired_difference(a, b, bounded=False)
    assert found.interval.estimate == pytest.approx(0.2) and found.interval.se == 0
    assert math.isnan(found.p) and math.isnan(found.interval.low)


@pytest.mark.parametrize("scale", [1e-12, 1.0, 1e9])
def test_a_difference_counts_whatever_the_size_of_the_numbers(scale: float) -> None:
    """Means of seven and of three equal numbers differ by rounding alone."""
    a, b = (
        Marks.of(
            [
                Sample(str(q), k, scale * (q + 1 / 7 + 0.01 * more), "x")
                for q in range(3)
                for k in range(samples)
            ],
            bounded=False,
        )
        for samples, more in ((7, 0), (3, 1))
    )
    fewer = Marks.of(
        [Sample(str(q), k, scale * (q + 1 / 7), "x") for q in range(3) for k in range(3)],
        bounded=False,
    )
    assert len(compare(a, fewer, bounded=False).ties) == 3
    assert len(compare(a, b, bounded=False).wins) == 3


def test_exams_are_compared_over_common_rows() -> None:
    one = Exam({"a": "1", "b": "2", "c": "3"}, {"a": "A", "b": "B", "c": "C"})
    assert row_differences(one, Exam({"a": "1", "b": "2"}, {"a": "A", "b": "B"})) == ()
    prompt, target = row_differences(one, Exam({"a": "9", "b": "2"}, {"a": "A", "b": "D"}))
    assert "1 of 3 rows have another prompt (a)" in prompt and "another target (b)" in target
