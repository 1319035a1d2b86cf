"""Cohen's kappa of a judge with marks that are known, and its interval."""

from collections.abc import Sequence

import numpy as np
import pytest

from batchgen.evals.scores.agreement import Agreement, agreement


def made(counts: Sequence[int]) -> Agreement:
    both, judge_only, known_only, neither = counts
    return Agreement(both, judge_only, known_only, neither, 0)


def test_kappa_of_a_table() -> None:
    found = Agreement(20, 5, 10, 15, 0)
    assert (found.count, found.share) == (50, 0.7)
    assert found.kappa == pytest.approx(0.4)
    low, high = found.interval
    assert (low, high) == pytest.approx((0.138, 0.631), abs=1e-3)


@pytest.mark.parametrize(
    ("counts", "kappa", "low", "high"),
    [
        ((30, 0, 0, 30), 1.0, 0.9, 1.0),
        ((0, 30, 30, 0), -1.0, -1.0, -0.8),
        ((25, 25, 25, 25), 0.0, -0.2, 0.2),
        ((40, 0, 0, 0), None, -0.6, 1.0),
        ((1, 0, 0, 0), None, -1.0, 1.0),
    ],
)
def test_extremes(counts: tuple[int, ...], kappa: float | None, low: float, high: float) -> None:
    found = made(counts)
    assert found.kappa == kappa
    assert found.interval[0] >= low and found.interval[1] <= high
    assert found.kappa is None or found.interval[0] <= found.kappa <= found.interval[1]


@pytest.mark.parametrize("shares", [(0.4, 0.1, 0.1, 0.4), (0.85, 0.02, 0.03, 0.1)])
def test_the_interval_holds_the_true_kappa(shares: tuple[float, ...]) -> None:
    true = made([round(10_000 * share) for share in shares]).kappa
    assert true is not None
    drawn = np.random.default_rng(0).multinomial(100, shares, 1000)
    intervals = [made([*map(int, counts)]).interval for counts in drawn]
    held = np.mean([low <= true <= high for low, high in intervals])
    assert 0.92 <= held <= 0.99


def test_marks_are_paired_and_what_is_unclear_is_left_out() -> None:
    judged = [1.0, 0.0, 1.0, 0.0, 0.5, None, 1.0, 1.0, 2.0]
    known = ["1.0", 0, "false", True, "1", "1", None, "x", 1]
    assert agreement(judged, known) == Agreement(1, 1, 1, 1, 5)
    assert agreement([0.75, 0.25], [0.6, 0.4]) == Agreement(1, 0, 0, 1, 0)
    assert agreement([0.5], ["1"]) is None
    assert agreement([], []) is None
