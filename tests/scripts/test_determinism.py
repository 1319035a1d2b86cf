"""The comparison of a row's bits between batches, on models so small that they take no time."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from unittest.mock import patch

import pytest
from modes.determinism import LAYERS, ON_CPU, Schedules
from torch import Tensor

from batchgen.engine.layers.feed_forward import mlp as mlp_layer
from batchgen.kernels.layers.activation import silu_and_mul

TOP = Path(__file__).resolve().parents[2]


@pytest.mark.thorough
@pytest.mark.parametrize("model", ["tiny", "tiny-hybrid", "tiny-sdar", "tiny-vl"])
def test_schedules_change_no_digest_on_a_cpu(model: str) -> None:
    found = Schedules(model, 6, ON_CPU).run()
    assert not found["by_cause"] and not found["by_kind"]
    assert found["seen"]["prefix hits"] and found["seen"]["preempted"]
    assert (found["seen"]["accepted drafts"] and found["seen"]["scored"]) or model == "tiny-sdar"


@pytest.mark.thorough
def test_the_first_operation_that_depends_on_the_batch_is_named() -> None:
    def dependent(x: Tensor) -> Tensor:
        return silu_and_mul(x) * (1 + 2**-20 * (len(x) > 700))

    with patch.object(mlp_layer, "silu_and_mul", dependent):
        found = Schedules("tiny", 6, ON_CPU).run()
    assert set(found["by_cause"]) == {"silu of layer 0, prompt"}
    assert sum(found["by_kind"].values()) == sum(found["by_cause"].values())


@pytest.mark.gpu
@pytest.mark.slow
@pytest.mark.parametrize("model", LAYERS)
def test_a_row_keeps_its_bits_on_a_gpu(model: str) -> None:
    """In a process of its own: how the library computes is settled by its first product."""
    run = [sys.executable, "scripts/bench/bench_engine.py", "determinism", "--deterministic"]
    ended = subprocess.run(
        [*run, "--models", model, "--schedules", "12"], capture_output=True, text=True, cwd=TOP
    )
    assert f"{model}, {LAYERS[model]} layers: 12 of 12 schedules equal" in ended.stdout, (
        ended.stdout[-2000:] + ended.stderr[-2000:]
    )
