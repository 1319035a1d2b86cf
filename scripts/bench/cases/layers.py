"""Cases of bench_kernels.py: the kernels between products, sampling, and experts on a CPU."""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Callable, Iterator
from functools import partial

import torch
from measuring import DEVICE, DTYPE, Case, microseconds, random_normal
from torch import Tensor

from batchgen.engine.layers.feed_forward.experts import Experts
from batchgen.engine.layers.linear import CPUProducts
from batchgen.engine.parallel.placement import Placement
from batchgen.engine.sampling.sampler import sample
from batchgen.engine.sampling.sampling_inputs import SamplingInputs
from batchgen.engine.sampling.sampling_params import SamplingParams
from batchgen.kernels.attention.kv_cache import KVCache, slot_mapping
from batchgen.kernels.attention.qkv import prepare_qkv
from batchgen.kernels.layers.activation import silu_and_mul
from batchgen.kernels.layers.embedding import embedding
from batchgen.kernels.layers.rms_norm import rms_norm

HIDDEN, HEADS, KV_HEADS, HEAD_DIM, INNER, VOCAB = 4096, 32, 8, 128, 12288, 151_936
BLOCK_SIZE = 16
_BUFFER_BYTES = 256 * 2**20
"""Bytes that are read before a buffer is read again, which is more than an L2 cache holds. For few
tokens, whose buffers are small, it is less."""
_MOST_BUFFERS = 64


def layer_cases(options: argparse.Namespace) -> Iterator[Case]:
    """The kernels between the matrix products of Qwen3-8B, on different buffers in turn."""
    table = random_normal(512 if options.tiny else VOCAB, HIDDEN)
    for tokens in options.tokens:
        smallest = tokens * HIDDEN * DTYPE.itemsize
        count = 1 if options.tiny else min(_MOST_BUFFERS, -(-_BUFFER_BYTES // smallest))
        for same in zip(*(_layers(tokens, table) for _ in range(count)), strict=True):
            name, _, num_bytes = same[0]
            yield Case(f"{name:18}{tokens:6}", [run for _, run, _ in same], num_bytes)


def _layers(tokens: int, table: Tensor) -> Iterator[tuple[str, Callable[[], object], int]]:
    """Yield every kernel with buffers of its own: its name, a launch, and the bytes it moves."""
    row = tokens * HIDDEN * DTYPE.itemsize
    weight, head_weight = random_normal(HIDDEN), random_normal(HEAD_DIM)
    x, gate_up = random_normal(tokens, HIDDEN), random_normal(tokens, 2 * INNER)
    yield "rms_norm", partial(rms_norm, x, weight, 1e-6), 2 * row
    yield "silu_and_mul", partial(silu_and_mul, gate_up), gate_up.nbytes * 3 // 2
    ids = torch.randint(len(table), (tokens,), device=DEVICE)
    yield "embedding", partial(embedding, ids, table), 2 * row
    qkv = random_normal(tokens, (HEADS + 2 * KV_HEADS) * HEAD_DIM)
    cos_sin = torch.randn((tokens, HEAD_DIM), device=DEVICE)
    blocks = 1 + -(-tokens // BLOCK_SIZE)
    tables = 1 + torch.randperm(blocks - 1, device=DEVICE)[None]
    cache = KVCache(*random_normal(2, KV_HEADS, blocks, BLOCK_SIZE, HEAD_DIM))
    positions = torch.arange(tokens, device=DEVICE)
    mapping = partial(slot_mapping, positions, None, tables, BLOCK_SIZE)
    for name, head in (("prepare_qkv", None), ("prepare_qkv, norm", head_weight)):
        run = partial(
            prepare_qkv, qkv, head, head, 1e-6, cos_sin, cache, mapping(), HEADS, KV_HEADS
        )
        yield name, run, 2 * qkv.nbytes + cos_sin.nbytes
    yield "slot_mapping", mapping, 16 * tokens
    yield "copy [T, 2·inner]", partial(torch.empty_like(gate_up).copy_, gate_up), 2 * gate_up.nbytes


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
    step = partial(microseconds, launches=1, warm_ups=3, replays=30, pick=statistics.median)
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
            run = partial(sample, logits, inputs, positions)
            yield Case(f"{rows:5} rows {name}", [run], logits.nbytes, time=step)


def cpu_expert_cases(options: argparse.Namespace) -> Iterator[Case]:
    """A layer of experts in float32 on the threads that torch has, beside the eager experts of
    transformers with equal weights, routed uniformly.

    Both run in turn, so that a slow phase of the machine affects both; the fastest of each counts.
    """
    from transformers import Qwen3MoeConfig
    from transformers.models.qwen3_moe.modeling_qwen3_moe import Qwen3MoeExperts

    count, hidden, inner = options.experts, options.hidden, options.inner
    config = Qwen3MoeConfig(hidden_size=hidden, moe_intermediate_size=inner, num_experts=count)
    config._experts_implementation = "eager"
    theirs = Qwen3MoeExperts(config)
    ours = Experts(count, hidden, inner, where=Placement(torch.device("cpu"), torch.float32))
    for own, other in (
        (ours.gate_up_proj, theirs.gate_up_proj),
        (ours.down_proj, theirs.down_proj),
    ):
        own.data.normal_(0, own.shape[-1] ** -0.5)
        other.data.copy_(own)
    ours.pack(CPUProducts())
    for tokens in options.tokens:
        x = torch.randn(tokens, hidden)
        weights, ids = torch.rand(tokens, count).softmax(-1).topk(options.chosen)
        both = (partial(ours, x, ids.int(), weights), partial(theirs, x, ids, weights))
        difference = float((both[0]() - both[1]()).abs().max())
        times = [[_microseconds_of(run) for run in both] for _ in range(options.rounds)]
        own_time, other_time = (min(column) for column in zip(*times, strict=True))
        name = f"{tokens:5} tokens, {torch.get_num_threads()} threads"
        yield Case(f"{name}, ours", [], time=lambda _, t=own_time: t)  # type: ignore[misc]
        ratio = f"{other_time / own_time:.2f} times ours, differs by {difference:.0e}"
        yield Case(f"{name}, transformers ({ratio})", [], time=lambda _, t=other_time: t)  # type: ignore[misc]


def _microseconds_of(run: Callable[[], object]) -> float:
    start = time.perf_counter()
    run()
    return (time.perf_counter() - start) * 1e6
