"""Rows whose vectors are nearly those of a row before."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from batchgen.inputs.steps.dedupe import Dedupe
from batchgen.inputs.steps.table_step import KEPT, BadRow, Dropped, StepRow, Tools
from batchgen.util.errors import ConfigError

angles = st.lists(st.integers(0, 35), max_size=30)


def kept_rows(rows: list[Any], cosine: float) -> list[int]:
    """The rows that are kept; what is said of the others names one of them."""
    step, kept = Dedupe(by=("v",), cosine=cosine).start(Tools({})), list[int]()
    for i, row in enumerate(rows):
        found = step.take(StepRow(str(i), i, {"v": row}))
        if found is KEPT:
            kept.append(i)
        else:
            assert isinstance(found, Dropped)
            assert found.reason.split(",")[0] in {f"near {k}" for k in kept}
    step.close()
    return kept


@given(angles)
def test_a_row_is_kept_if_no_kept_one_is_near(found: list[int]) -> None:
    """Vectors of any length in a plane, 10 degrees apart; 15 degrees are near."""
    turns = [np.deg2rad(10 * angle) for angle in found]
    rows = [[float((1 + i) * np.cos(t)), float((1 + i) * np.sin(t))] for i, t in enumerate(turns)]
    expected: list[int] = []
    for i, angle in enumerate(found):
        if all(min((angle - found[j]) % 36, (found[j] - angle) % 36) > 1 for j in expected):
            expected.append(i)
    assert kept_rows(rows, float(np.cos(np.deg2rad(15)))) == expected


def test_many_rows_and_equal_ones() -> None:
    vectors = np.random.default_rng(0).standard_normal((300, 8)).tolist()
    assert kept_rows([*vectors, *vectors[::7]], 1.0) == list(range(300))


@pytest.mark.parametrize(
    "bad",
    [
        None,
        "x",
        [0.0, 0.0],
        [],
        [1.0],
        [True, 1.0],
        [float("nan"), 1.0],
        [10**400, 1],
        [1.2e154, 1.2e154],
    ],
)
def test_what_is_no_vector_is_a_bad_row(bad: Any) -> None:
    step = Dedupe(by=("v",), cosine=0.9).start(Tools({}))
    assert step.take(StepRow("0", 0, {"v": [1.0, 2.0]})) is KEPT
    with pytest.raises(BadRow, match="column 'v'"):
        step.take(StepRow("1", 1, {"v": bad}))


def test_options_that_do_not_go_together() -> None:
    for options in (
        {"cosine": 2.0},
        {"cosine": 0.9, "near": 0.8},
        {"cosine": 0.9, "by": ("a", "b")},
    ):
        with pytest.raises(ConfigError, match="cosine"):
            Dedupe(**{"by": ("v",), **options})  # type: ignore[arg-type]
