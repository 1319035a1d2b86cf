"""The table of N arms: Holm's p values, differences to the first, arms that share no question."""

import math

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy import stats

from batchgen.evals.arms.arm_table import Arm, arm_table
from batchgen.evals.arms.arm_values import table_lines, table_values
from batchgen.evals.arms.holm import holm
from batchgen.evals.scores.intervals import mean_interval
from batchgen.evals.scores.marks import Floats, Marks, Sample
from batchgen.evals.scores.paired_comparison import compare, unpaired_difference
from tests.support.cases import thorough


def marks(rows: Floats, prefix: str = "q", *, bounded: bool = True) -> Marks:
    """Marks [Q, K] of questions with ids PREFIX0, PREFIX1, …"""
    samples = [
        Sample(f"{prefix}{q}", k, float(mark), str(mark))
        for q, row in enumerate(rows)
        for k, mark in enumerate(row)
    ]
    return Marks.of(samples, bounded=bounded)


def drawn(p: float, seed: int, n: int = 40, k: int = 1) -> Floats:
    return (np.random.default_rng(seed).random((n, k)) < p).astype(np.float64)


def test_holm_is_the_published_procedure() -> None:
    """Worked by hand: p 0.01, 0.04, 0.03, 0.005 are rejected at 0.05 for the first and the last."""
    assert holm([0.01, 0.04, 0.03, 0.005]) == pytest.approx([0.03, 0.06, 0.06, 0.02])
    assert holm([None, 0.5, math.nan, 0.9]) == [None, 1.0, pytest.approx(math.nan, nan_ok=True), 1]
    assert holm([]) == []


@given(st.lists(st.floats(0, 1), min_size=1, max_size=12), st.randoms())
def test_holm_keeps_the_order_and_is_at_least_p(values: list[float], random: object) -> None:
    found = holm(values)
    pairs = sorted(zip(values, found, strict=True))
    assert all(q is not None and p <= q <= min(1, p * len(values)) + 1e-12 for p, q in pairs)
    assert [q for _, q in pairs] == sorted(q for q in found if q is not None)
    order = list(range(len(values)))
    random.shuffle(order)  # type: ignore[attr-defined]
    assert holm([values[i] for i in order]) == pytest.approx([found[i] for i in order])


@pytest.mark.parametrize("tables", [60, *thorough(400)])
def test_holm_keeps_its_word_over_tables_of_equal_arms(tables: int) -> None:
    """At most about 5 of 100 tables with five equal arms have any p below 0.05."""
    rng = np.random.default_rng(3)
    any_below = 0
    for _ in range(tables):
        p = rng.beta(2, 1, (40, 1))
        arms = [
            Arm(str(i), marks=marks((rng.random((40, 1)) < p).astype(np.float64))) for i in range(5)
        ]
        found = [row.p_holm for row in arm_table(arms).rows]
        any_below += any(p is not None and p < 0.05 for p in found)
    assert any_below <= 0.075 * tables


@settings(max_examples=20, deadline=None)
@given(st.permutations(range(1, 5)))
def test_the_order_behind_the_first_changes_no_figure(order: list[int]) -> None:
    arms = [Arm(str(i), marks=marks(drawn(0.4 + 0.1 * i, i))) for i in range(5)]
    found = {row.arm.name: row for row in arm_table(arms).rows}
    for row in arm_table([arms[0], *(arms[i] for i in order)]).rows:
        assert row.p_holm == pytest.approx(found[row.arm.name].p_holm)
        assert row.difference == found[row.arm.name].difference
        assert row.score == found[row.arm.name].score


def test_the_table_of_two_is_their_comparison() -> None:
    a, b = marks(drawn(0.5, 1, k=4)), marks(drawn(0.7, 2, k=4))
    row = arm_table([Arm("a", marks=a), Arm("b", marks=b)]).rows[1]
    assert row.comparison == compare(a, b) and row.p == row.p_holm == compare(a, b).p
    assert (row.questions, row.answers, row.shared) == (40, 160, 40)


def test_the_first_with_a_score_is_what_others_are_compared_with() -> None:
    arms = [
        Arm("killed", without="the job is not complete"),
        Arm("base", marks=marks(drawn(0.5, 1))),
        Arm("math", marks=marks(drawn(0.9, 2)), other_exam="40 of 40 rows have another prompt"),
        Arm("more", marks=marks(drawn(0.9, 3))),
    ]
    table = arm_table(arms)
    assert table.first is not None and table.first.arm.name == "base" and table.tests == 1
    assert [row.difference is None for row in table.rows] == [True, True, True, False]
    lines = "\n".join(table_lines(table))
    assert "A: has no score: the job is not complete" in lines
    assert "C: took a different exam, and is not compared: 40 of 40 rows" in lines
    assert table_values(table)["arms"][0]["score"] is None


def test_arms_without_common_questions_are_not_paired() -> None:
    a, b = drawn(0.4, 1, n=60), drawn(0.8, 2, n=50)
    table = arm_table([Arm("a", marks=marks(a)), Arm("b", marks=marks(b, "other"))])
    row = table.rows[1]
    assert row.comparison is None and row.difference is not None
    assert row.difference.estimate == pytest.approx(b.mean() - a.mean())
    assert "the difference is not paired" in "\n".join(table_lines(table))


def test_unpaired_figures_are_those_of_welch() -> None:
    rng = np.random.default_rng(0)
    a, b = rng.normal(3, 1, (30, 1)), rng.normal(4, 2, (20, 1))
    found = unpaired_difference(
        marks(a, bounded=False), marks(b, "r", bounded=False), bounded=False
    )
    known = stats.ttest_ind(b[:, 0], a[:, 0], equal_var=False)
    low, high = known.confidence_interval()
    assert found.p == pytest.approx(known.pvalue)
    assert (found.interval.low, found.interval.high) == pytest.approx((low, high))


@pytest.mark.parametrize(("x", "n", "y", "m"), [(12, 20, 7, 25), (0, 15, 3, 10), (9, 9, 8, 8)])
def test_unpaired_marks_have_the_points_of_agresti_and_caffo(
    x: int, n: int, y: int, m: int
) -> None:
    """The middle and the error are theirs; quantiles are of t, and variances those of a sample."""
    sides = [np.array([[1.0]] * r + [[0.0]] * (k - r)) for r, k in ((x, n), (y, m))]
    found = unpaired_difference(marks(sides[0]), marks(sides[1], "r")).interval
    (p, p_n), (q, q_n) = (((r + 1) / (k + 2), k + 2) for r, k in ((x, n), (y, m)))
    assert (found.low + found.high) / 2 == pytest.approx(q - p)
    variances = p * (1 - p) / (p_n - 1), q * (1 - q) / (q_n - 1)
    df = sum(variances) ** 2 / (variances[0] ** 2 / (n - 1) + variances[1] ** 2 / (m - 1))
    reach = stats.t.ppf(0.975, df) * math.sqrt(sum(variances))
    assert (found.high - found.low) / 2 == pytest.approx(reach)


def test_numbers_of_any_size_have_the_interval_of_a_t_test() -> None:
    values = np.random.default_rng(1).normal(7, 2, 25)
    found = mean_interval(values, np.arange(25))
    low, high = stats.t.interval(0.95, 24, values.mean(), stats.sem(values))
    assert found is not None and (found.low, found.high) == pytest.approx((low, high))
    equal = mean_interval(np.full(5, 3.0), np.arange(5))
    assert equal is not None and equal.estimate == 3 and math.isnan(equal.low)


def test_equal_numbers_do_not_make_a_difference_certain() -> None:
    rows = np.full((10, 1), 8.0)
    one = marks(rows, bounded=False)
    row = arm_table([Arm("a", marks=one), Arm("b", marks=one)], "score").rows[1]
    assert row.difference is not None and row.difference.estimate == 0
    assert row.p is not None and math.isnan(row.p)
    assert "95%" not in table_lines(arm_table([Arm("a", marks=one)], "score"))[0]
