"""The comparison of a row's bits between batches, on models so small that they take no time."""

from __future__ import annotations

import argparse
import multiprocessing
import subprocess
import sys
from pathlib import Path
from unittest.mock import patch

import pytest
import torch
from modes import determinism
from modes.determinism import LAYERS, ON_CPU, Schedules
from torch import Tensor

from batchgen.engine.layers.feed_forward import mlp as mlp_layer
from batchgen.kernels.layers.activation import silu_and_mul
from tests.support.cases import some_slow
from tests.support.engine.ranked_engines import forked_ranks

TOP = Path(__file__).resolve().parents[2]


@pytest.mark.thorough
@pytest.mark.parametrize(
    "model",
    some_slow(["tiny", "tiny-hybrid", "tiny-sdar", "tiny-vl"], ["tiny-hybrid", "tiny-sdar"]),
)
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


def schedules_on_gpus(model: str, *more: str) -> str:
    """In a process of its own: how the library computes is settled by its first product."""
    run = [sys.executable, "scripts/bench/bench_engine.py", "determinism", "--deterministic"]
    ended = subprocess.run(
        [*run, "--models", model, "--schedules", "12", *more],
        capture_output=True,
        text=True,
        cwd=TOP,
    )
    return ended.stdout + ended.stderr[-2000:]


@pytest.mark.gpu
@pytest.mark.slow
@pytest.mark.parametrize("model", LAYERS)
def test_a_row_keeps_its_bits_on_a_gpu(model: str) -> None:
    said = schedules_on_gpus(model)
    assert f"{model}, {LAYERS[model]} layers: 12 of 12 schedules equal" in said, said[-4000:]


@pytest.mark.gpu
@pytest.mark.slow
@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs")
@pytest.mark.parametrize("model", ["qwen3-0.6b", "qwen3-30b-a3b"])
def test_a_row_keeps_its_bits_on_two_gpus(model: str) -> None:
    said = schedules_on_gpus(model, "--ranks", "2")
    kept = f"{model}, {LAYERS[model]} layers on 2 ranks: 12 of 12 schedules equal"
    assert kept in said, said[-4000:]


@pytest.mark.thorough
def test_schedules_change_no_digest_on_two_ranks(capsys: pytest.CaptureFixture[str]) -> None:
    parser = argparse.ArgumentParser()
    determinism.add_arguments(parser)
    options = parser.parse_args(["--models", "tiny-vl", "--schedules", "4", "--ranks", "2"])
    fork = multiprocessing.get_context("fork")
    with patch.object(determinism, "get_context", lambda _: fork), forked_ranks():
        determinism.run(options)
    assert "all layers on 2 ranks: 4 of 4 schedules equal" in capsys.readouterr().out
