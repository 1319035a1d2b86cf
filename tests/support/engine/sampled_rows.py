"""Rows with every sampling option, for the tests of the sampler."""

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import torch
from hypothesis import strategies as st

from batchgen.engine.interface.outputs import StepOutput
from batchgen.engine.sampling.sampler_columns import requested_columns
from batchgen.engine.sampling.sampling_inputs import SamplingInputs
from batchgen.engine.sampling.sampling_params import RequestParams

CPU = torch.device("cpu")
INF = float("inf")

PROMPT = [3, 1, 4, 1]
OUTPUT = [5, 3, 3]
STOP_IDS = (2, 5)
POSITION = len(PROMPT) + len(OUTPUT)

OPTIONS = {
    "plain": RequestParams(),
    "greedy": RequestParams(temperature=0, top_k=2, top_p=0.1, min_p=0.9),
    "cold": RequestParams(temperature=0.5),
    "hot": RequestParams(temperature=1.7),
    "top_k": RequestParams(top_k=3),
    "top_k of all": RequestParams(top_k=1000),
    "top_p": RequestParams(top_p=0.7),
    "min_p": RequestParams(min_p=0.15),
    "repetition": RequestParams(repetition_penalty=1.8),
    "presence": RequestParams(presence_penalty=1.1),
    "frequency": RequestParams(frequency_penalty=-0.9),
    "banned stop": RequestParams(min_new_tokens=4),
    "stop allowed again": RequestParams(min_new_tokens=3),
    "greedy with penalties": RequestParams(
        temperature=0, repetition_penalty=3.0, frequency_penalty=1.5, min_new_tokens=9
    ),
    "everything": RequestParams(
        temperature=0.8,
        top_k=6,
        top_p=0.9,
        min_p=0.02,
        repetition_penalty=1.2,
        presence_penalty=0.3,
        frequency_penalty=0.4,
        min_new_tokens=4,
    ),
}


def build(
    params: Sequence[RequestParams],
    prompt: Sequence[int] = PROMPT,
    output: Sequence[int] = OUTPUT,
    stop_ids: Sequence[int] = STOP_IDS,
    device: torch.device = CPU,
) -> SamplingInputs:
    count = len(params)
    return SamplingInputs.build(
        params,
        [len(prompt)] * count,
        [[*prompt, *output]] * count,
        [stop_ids] * count,
        [len(prompt) + p.max_new_tokens for p in params],
        device,
    )


def numbers(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.from_numpy(np.random.default_rng(seed).normal(size=shape)).float()


def mixed_params() -> list[RequestParams]:
    params = [replace(p, seed=1000 + i) for i, p in enumerate(OPTIONS.values())]
    asks: tuple[dict[str, Any], ...] = (
        {"logprobs": True},
        {},
        {"logprobs": True, "top_logprobs": 3, "logprobs_mode": "processed"},
        {"top_logprobs": 7},
        {"logprobs": True, "logprobs_mode": "processed"},
        {"logprobs": True, "top_logprobs": 40},
    )
    return [
        replace(p, **asks[(i + turn) % len(asks)], seed=p.seed + 100 * turn)
        for turn in range(2)
        for i, p in enumerate(params)
    ]


def row_of(step: StepOutput, i: int, params: RequestParams) -> dict[str, torch.Tensor]:
    """What row i asked for, each column cut to its own shape."""
    out = {"token_ids": step.token_ids[i]}
    for column in requested_columns(params):
        values = step.columns[column.name][i]
        out[column.name] = values[(slice(None), *(slice(n) for n in column.tail_shape))]
    return out


probability = st.floats(2**-10, 1, width=32)
any_params = st.builds(
    RequestParams,
    temperature=st.one_of(st.just(0.0), st.just(1.0), st.floats(1e-5, 100)),
    top_k=st.integers(0, 9),
    top_p=st.one_of(st.just(1.0), probability),
    min_p=st.one_of(st.just(0.0), probability),
    repetition_penalty=st.one_of(st.just(1.0), st.floats(0.1, 10)),
    presence_penalty=st.floats(-2, 2),
    frequency_penalty=st.floats(-2, 2),
    min_new_tokens=st.integers(0, 6),
    seed=st.integers(-(2**63), 2**64 - 1),
)
