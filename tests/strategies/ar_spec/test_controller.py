"""The controller, which chooses the number of drafts by measured times and acceptance."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from batchgen.strategies.ar_spec.controller import Acceptance, DraftBudget, ForwardSeconds

LENGTHS = (0, 1, 2, 3, 5, 7)
FLAT = ForwardSeconds([1, 10_000], [1.0, 1.0])
PROPORTIONAL = ForwardSeconds([1, 10_000], [1.0, 10_000.0])
GPU = ForwardSeconds([1, 200, 2000], [1.0, 1.0, 10.0])
"""Bound by the weights' bytes up to 200 tokens, then by arithmetic."""


def best_drafts(
    rows: int,
    lengths: Sequence[int],
    acceptance: Acceptance,
    costs: ForwardSeconds,
    draft_costs: ForwardSeconds | None,
) -> int:
    def of_drafts(num_rows: int, k: int) -> float:
        return 0.0 if draft_costs is None else k * draft_costs(num_rows)

    return DraftBudget(lengths, costs, of_drafts).choose(rows, acceptance)


def seen(rate: float, k: int = 7, steps: int = 300, rows: int = 16) -> Acceptance:
    """After steps of k drafts, each of which held with this probability if all before it did."""
    acceptance, rng = Acceptance(), np.random.default_rng(0)
    for _ in range(steps):
        runs = (rng.random((rows, k)) < rate).cumprod(1).sum(1)
        acceptance.observe(runs.astype(np.int32), k)
    return acceptance


def test_free_forwards_take_all_drafts() -> None:
    assert best_drafts(8, LENGTHS, seen(0.9), FLAT, None) == 7
    assert best_drafts(8, LENGTHS, Acceptance(), FLAT, None) == 7
    assert best_drafts(8, (0, 1, 2, 3, 4), seen(1.0), FLAT, None) == 4
    assert best_drafts(8, (0, 1), seen(1.0), FLAT, None) == 1


@pytest.mark.parametrize("rate", [0.0, 0.5, 0.9, 1.0])
def test_no_drafts_where_every_token_costs_as_much(rate: float) -> None:
    acceptance = seen(rate)
    assert best_drafts(8, LENGTHS, acceptance, PROPORTIONAL, None) == 0
    acceptance.skipped = 10**6
    assert best_drafts(8, LENGTHS, acceptance, PROPORTIONAL, None) == 0, "hopeless at any rate"


def test_no_drafts_where_none_holds() -> None:
    for costs in (FLAT, GPU, PROPORTIONAL):
        assert best_drafts(8, LENGTHS, seen(0.0), costs, None) == 0


def test_no_rows_have_no_drafts() -> None:
    assert best_drafts(0, LENGTHS, seen(1.0), FLAT, None) == 0


def test_a_probe_after_64_steps_without_drafts() -> None:
    acceptance = seen(0.0)
    for skipped in range(64):
        acceptance.skipped = skipped
        assert best_drafts(8, LENGTHS, acceptance, GPU, None) == 0
    acceptance.skipped = 64
    assert best_drafts(8, LENGTHS, acceptance, GPU, None) == 1
    # Beyond 1000 rows even a draft that always holds costs more than it brings.
    assert best_drafts(2000, LENGTHS, acceptance, GPU, None) == 0


def test_probes_find_drafts_that_hold_by_now() -> None:
    acceptance = seen(0.0, steps=1000)
    for _ in range(400):
        k = best_drafts(8, LENGTHS, acceptance, GPU, None)
        acceptance.skipped = 0 if k else acceptance.skipped + 1
        if k:
            acceptance.observe(np.full(8, k, np.int32), k)
    assert best_drafts(8, LENGTHS, acceptance, GPU, None) == 7


@pytest.mark.parametrize("rate", [0.3, 0.5, 0.7, 0.9])
def test_larger_batches_have_fewer_drafts(rate: float) -> None:
    acceptance = seen(rate)
    chosen = [best_drafts(rows, LENGTHS, acceptance, GPU, None) for rows in range(1, 400)]
    assert chosen == sorted(chosen, reverse=True)
    assert chosen[0] >= 5 and chosen[-1] == 0


def test_more_acceptance_has_more_drafts() -> None:
    chosen = [best_drafts(30, LENGTHS, seen(rate / 10), GPU, None) for rate in range(11)]
    assert chosen == sorted(chosen) and chosen[0] == 0 and chosen[-1] == 7


def test_a_dear_draft_model_drafts_less() -> None:
    acceptance = seen(0.7)
    chosen = [
        best_drafts(8, LENGTHS, acceptance, FLAT, ForwardSeconds([1], [seconds]))
        for seconds in (0.0, 0.05, 0.2, 0.5, 1.0)
    ]
    assert chosen == sorted(chosen, reverse=True) and chosen[0] == 7 and chosen[-1] == 0


@settings(max_examples=100, deadline=None)
@given(
    st.integers(0, 500),
    st.integers(1, 7),
    st.lists(st.tuples(st.integers(1, 7), st.lists(st.integers(-1, 7), min_size=1)), max_size=20),
    st.lists(st.floats(1e-6, 1.0), min_size=1, max_size=6),
    st.integers(0, 200),
)
def test_what_is_offered_and_what_survives(
    rows: int,
    most: int,
    steps: list[tuple[int, list[int]]],
    seconds: list[float],
    skipped: int,
) -> None:
    """The choice is among the lengths; survival is a probability that never rises with the place,
    whatever numbers of drafts came before, and for rows that failed (-1)."""
    acceptance = Acceptance()
    for k, accepted in steps:
        acceptance.observe(np.minimum(np.array(accepted, np.int32), k), k)
    acceptance.skipped = skipped
    survival = acceptance.survival(7)
    assert len(survival) == 7
    assert all(0 <= share <= 1 for share in survival)
    assert (np.diff(survival) <= 0).all()
    lengths = (*(k for k in (0, 1, 2, 3, 5) if k < most), most)
    costs = ForwardSeconds([2**i for i in range(len(seconds))], seconds)
    assert best_drafts(rows, lengths, acceptance, costs, None) in lengths


@pytest.mark.parametrize("rate", [0.2, 0.6, 0.95])
def test_survival_is_what_was_seen(rate: float) -> None:
    survival = seen(rate, k=4).survival(4)
    np.testing.assert_allclose(survival, rate ** np.arange(1, 5), atol=0.06)
    # Of places that were never tried nothing is known but the rate of the first.
    assert seen(rate, k=4).survival(5)[4] == pytest.approx(survival[3] * survival[0], abs=0.03)


def test_old_steps_are_forgotten() -> None:
    acceptance = seen(0.0)
    for _ in range(300):
        acceptance.observe(np.full(16, 3, np.int32), 3)
    assert min(acceptance.survival(3)) > 0.9


def test_costs_between_and_beyond_what_was_measured() -> None:
    costs = ForwardSeconds([1, 10, 30], [1.0, 2.0, 6.0])
    assert [costs(n) for n in (1, 10, 20, 30, 40)] == pytest.approx([1.0, 2.0, 4.0, 6.0, 8.0])
    assert ForwardSeconds([4], [3.0])(100) == 3.0
    # A measurement that was faster for more tokens was noise.
    assert ForwardSeconds([1, 2, 3], [2.0, 1.0, 3.0])(2) == 2.0
