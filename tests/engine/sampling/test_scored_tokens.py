"""What the sampler says of given tokens is what it says of tokens that it draws."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch

from batchgen.engine.interface.outputs import StepOutput
from batchgen.engine.sampling.processed_logits import process
from batchgen.engine.sampling.sampler import sample_fused, sample_tokens, score_fused, score_tokens
from batchgen.engine.sampling.sampling_inputs import SamplingInputs
from batchgen.engine.sampling.sampling_params import RequestParams

INF = float("inf")
DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")
HISTORY = [3, 5, 8, 3, 9]
Step = Callable[..., StepOutput]
OPTIONS: tuple[dict[str, Any], ...] = (
    {},
    {"temperature": 0.6, "top_logprobs": 4},
    {"logprobs_mode": "processed"},
    {"logprobs_mode": "processed", "temperature": 0.5, "top_logprobs": 6},
    {"logprobs_mode": "processed", "temperature": 1.4, "top_k": 9},
    {"logprobs_mode": "processed", "top_p": 0.6, "min_p": 0.05, "top_logprobs": 2},
    {"logprobs_mode": "processed", "temperature": 0, "top_k": 3},
    {"logprobs_mode": "processed", "repetition_penalty": 1.5, "frequency_penalty": 0.7},
)


def inputs() -> SamplingInputs:
    params = [RequestParams(logprobs=True, seed=i, **each) for i, each in enumerate(OPTIONS)]
    count = len(params)
    return SamplingInputs.build(
        params, [2] * count, [HISTORY] * count, [()] * count, [9] * count, DEVICE
    )


def logits(dtype: torch.dtype, vocab: int = 5003) -> torch.Tensor:
    values = np.random.default_rng(1).normal(size=(len(OPTIONS), vocab)) * 3
    return torch.from_numpy(values).to(DEVICE, dtype)


@pytest.mark.quick(1)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(
    ("draw", "describe"), [(sample_tokens, score_tokens), (sample_fused, score_fused)]
)
def test_a_drawn_token_is_scored_with_its_bits(
    draw: Step, describe: Step, dtype: torch.dtype
) -> None:
    positions = torch.full((len(OPTIONS),), len(HISTORY), device=DEVICE)
    values, sampling = logits(dtype), inputs()
    drawn = draw(values, sampling, positions)
    found = describe(values, sampling, positions, drawn.token_ids[:, 0])
    assert torch.equal(found.token_ids, drawn.token_ids) and not found.failed.any()
    assert {f"answer_{name}" for name in drawn.columns} == found.columns.keys()
    for name, column in drawn.columns.items():
        assert torch.equal(found.columns[f"answer_{name}"], column), name


@pytest.mark.thorough
@pytest.mark.parametrize(
    ("describe", "stride"),
    [
        (score_tokens, 1),
        (score_fused, 12),  # the interpreter takes a second for each token
        pytest.param(score_fused, 1, marks=pytest.mark.slow),
    ],
)
def test_any_token_is_scored_by_the_law_that_rows_are_drawn_from(
    describe: Step, stride: int
) -> None:
    positions = torch.full((len(OPTIONS),), len(HISTORY), device=DEVICE)
    values, sampling = logits(torch.float32, 60), inputs()
    law = process(values, sampling, positions).log_softmax(-1)
    raw = values.log_softmax(-1)
    modes = [each.get("logprobs_mode") == "processed" for each in OPTIONS]
    expected = torch.where(torch.tensor(modes, device=DEVICE)[:, None], law, raw)
    excluded = 0
    for token in range(0, 60, stride):
        given = torch.full((len(OPTIONS),), token, device=DEVICE)
        found = describe(values, sampling, positions, given).columns["answer_logprobs"][:, 0]
        torch.testing.assert_close(found, expected[:, token], rtol=1e-5, atol=1e-5)
        excluded += int((found == -INF).sum())
    assert excluded > 60 // stride, "filters exclude tokens"


@pytest.mark.quick(1)
@pytest.mark.parametrize("describe", [score_tokens, score_fused])
def test_broken_rows_are_found(describe: Step) -> None:
    positions = torch.full((len(OPTIONS),), len(HISTORY), device=DEVICE)
    values = logits(torch.float32, 60)
    values[1, 7], values[3, 2], values[5] = float("nan"), INF, -INF
    step = describe(values, inputs(), positions, torch.zeros_like(positions))
    assert step.failed.nonzero().squeeze(1).tolist() == [1, 3, 5]
