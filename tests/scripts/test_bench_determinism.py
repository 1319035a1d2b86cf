"""The comparison of a row's bits between batches, on models so small that they take no time."""

from __future__ import annotations

from unittest.mock import patch

import pytest
import torch
from bench_determinism import Line, product_lines, ranges, table
from determinism_schedules import run_schedules
from torch import Tensor

from batchgen.engine.layers.feed_forward import mlp as mlp_layer
from batchgen.kernels.layers.activation import silu_and_mul

CPU = torch.device("cpu")
SIZES = {"tokens": 3_000, "rows": 6}


@pytest.mark.parametrize("model", ["tiny", "tiny-hybrid"])
def test_schedules_change_no_digest_on_a_cpu(model: str) -> None:
    found = run_schedules(model, "today", 4, CPU, **SIZES)
    assert not found.by_cause and set(found.by_kind.values()) == {0}
    assert found.seen["prefix hits"] and found.seen["accepted drafts"]


def test_the_first_operation_that_depends_on_the_batch_is_named() -> None:
    def dependent(x: Tensor) -> Tensor:
        return silu_and_mul(x) * (1 + 2**-20 * (len(x) > 700))

    with patch.object(mlp_layer, "silu_and_mul", dependent):
        found = run_schedules("tiny", "today", 6, CPU, **SIZES)
    assert set(found.by_cause) == {"silu of layer 0, prompt"}
    assert sum(found.by_kind.values()) == sum(found.by_cause.values())


def test_each_product_has_a_line_and_all_have_one() -> None:
    *products, whole = product_lines(["tiny"], "today")
    assert products and whole.what == "tiny, all products"
    assert all(" rows" in line.bits for line in products)


def test_numbers_are_written_as_ranges() -> None:
    assert ranges([1, 2, 3, 8, 24], [1, 2, 3, 4, 8, 24, 40]) == "1–3, 8–24"


def test_the_table_has_a_row_for_each_line() -> None:
    assert table([Line("A", "b", "c", "d")]).splitlines()[-1] == "| A | b | c | d |  |"
