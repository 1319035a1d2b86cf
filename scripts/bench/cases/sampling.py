"""Cases of bench_kernels.py: a step of sampling."""

from __future__ import annotations

import argparse
from collections.abc import Iterator

import torch
from measuring import DEVICE, Case

from batchgen.engine.sampling.sampler import sample
from batchgen.engine.sampling.sampling_inputs import SamplingInputs
from batchgen.engine.sampling.sampling_params import SamplingParams

SAMPLINGS = {
    "greedy": SamplingParams(temperature=0),
    "sampled": SamplingParams(temperature=0.8),
    "+ logprobs": SamplingParams(temperature=0.8, logprobs=True),
    "+ top_k 50": SamplingParams(temperature=0.8, top_k=50),
    "+ top_p 0.95": SamplingParams(temperature=0.8, top_p=0.95),
    "+ min_p 0.05": SamplingParams(temperature=0.8, min_p=0.05),
    "+ all three filters": SamplingParams(temperature=0.8, top_k=50, top_p=0.95, min_p=0.05),
    "+ top_p, flat": SamplingParams(temperature=4, top_p=0.95),
    "+ penalties": SamplingParams(temperature=0.8, repetition_penalty=1.1, presence_penalty=0.5),
    "+ min_new_tokens": SamplingParams(temperature=0.8, min_new_tokens=200),
    "+ top_logprobs 20": SamplingParams(temperature=0.8, top_logprobs=20),
}
HISTORY = 2048
"""Tokens of a row before the one that is drawn."""


def sampling_cases(options: argparse.Namespace) -> Iterator[Case]:
    """A sampling step, beside one read of the logits: normally distributed, with eight likely
    tokens in every row."""
    vocab = 1000 if options.tiny else options.vocab
    for rows in options.rows:
        generator = torch.Generator(DEVICE).manual_seed(0)
        logits = torch.empty(rows, vocab, device=DEVICE).normal_(0, 2.5, generator=generator)
        likely = torch.randint(0, vocab, (rows, 8), device=DEVICE, generator=generator)
        logits.scatter_add_(1, likely, torch.linspace(18, 6, 8, device=DEVICE).expand(rows, -1))
        logits, positions = logits.bfloat16(), torch.full((rows,), HISTORY, device=DEVICE)
        history = [i * 7919 % vocab for i in range(HISTORY)]
        for name, params in SAMPLINGS.items():
            inputs = SamplingInputs.build(
                [params] * rows, [HISTORY // 2] * rows, [history] * rows, [(0, 1)] * rows,
                [HISTORY + 1] * rows, DEVICE,
            )  # fmt: skip

            def run(_: None, i: int, logits=logits, inputs=inputs, positions=positions) -> object:  # type: ignore[no-untyped-def]
                return sample(logits, inputs, positions)

            yield Case(f"{rows:5} rows {name}", run, num_bytes=logits.nbytes)
