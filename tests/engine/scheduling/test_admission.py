"""Admission's arithmetic against plain simulations of it."""

from __future__ import annotations

import math

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from batchgen.engine.scheduling import admission
from batchgen.engine.scheduling.admission import LengthPredictor, peak_tokens

Rows = list[tuple[int, int]]


def simulated_peak(rows: Rows) -> int:
    """The most that rows (held, remaining) hold at any step; a row that ends frees all it has."""
    peak = 0
    for step in range(1 + max((remaining for _, remaining in rows), default=0)):
        peak = max(peak, sum(held + step for held, remaining in rows if remaining >= step))
    return peak


@given(rows=st.lists(st.tuples(st.integers(0, 60), st.integers(0, 40)), max_size=12))
def test_the_peak_is_that_of_a_simulation_step_by_step(rows: Rows) -> None:
    held, remaining = np.array(rows, np.int64).reshape(-1, 2).T
    assert peak_tokens(held, remaining) == simulated_peak(rows)


def plain_prediction(finished: list[int], generated: int, limit: int, exact: bool) -> int:
    if exact:
        return limit
    longer = [length for length in finished if length > generated]
    guess = math.ceil(sum(longer) / len(longer)) if longer else max(256, 2 * generated)
    return min(guess, limit)


@settings(deadline=None)
@given(
    finished=st.lists(st.integers(0, 1000), max_size=40),
    rows=st.lists(st.tuples(st.integers(0, 1000), st.integers(0, 1000), st.booleans()), max_size=8),
    asked_before=st.integers(0, 40),
)
def test_a_row_gets_as_long_as_the_finished_rows_longer_than_it(
    finished: list[int], rows: list[tuple[int, int, bool]], asked_before: int
) -> None:
    predictor = LengthPredictor()
    generated = np.array([g for g, _, _ in rows], np.int64)
    limits = generated + np.array([more for _, more, _ in rows], np.int64)
    exact = np.array([e for _, _, e in rows], np.bool_)
    for i, length in enumerate(finished):
        if i == asked_before:
            predictor.predict(generated, limits, exact)
        predictor.observe(length)
    predicted = predictor.predict(generated, limits, exact)
    assert predicted.dtype == np.int64
    arguments = zip(generated.tolist(), limits.tolist(), exact.tolist(), strict=True)
    assert predicted.tolist() == [plain_prediction(finished, *row) for row in arguments]
    assert (predicted >= generated).all()


def test_rows_that_ended_long_ago_are_forgotten() -> None:
    predictor = LengthPredictor()
    row = np.array([0]), np.array([10**6]), np.array([False])
    for _ in range(admission._RECENT):
        predictor.observe(900)
    assert predictor.predict(*row) == [900]
    for _ in range(admission._RECENT):
        predictor.observe(40)
    assert predictor.predict(*row) == [40]
