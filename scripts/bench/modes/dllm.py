"""The mode dllm of bench_engine.py: steps of block diffusion beside autoregressive forwards."""

from __future__ import annotations

import argparse
import itertools
import statistics
from typing import Any

import numpy as np
import torch
from measuring import DEVICE, commas, event_times
from shapes import MODELS
from workloads import dummy_model

from batchgen.engine.caches.model_caches import CacheSizes
from batchgen.engine.device.step_timing import StepTimer
from batchgen.engine.execution.graph_shapes import GraphShapes, launch_bound_tokens
from batchgen.engine.execution.model_inputs import ModelInputs
from batchgen.engine.execution.model_runner import ModelRunner
from batchgen.engine.interface.engine_config import EngineConfig
from batchgen.engine.llm_engine import LLMEngine
from batchgen.engine.memory.model_use import ModelUse
from batchgen.engine.models.causal_lm import CausalLM
from batchgen.engine.sampling.sampler import sample
from batchgen.engine.sampling.sampling_inputs import SamplingInputs
from batchgen.engine.sampling.sampling_params import SamplingParams
from batchgen.strategies.dllm.strategy import DLLMStrategy

GREEDY = SamplingParams(temperature=0, max_new_tokens=100_000, ignore_eos=True)
BLOCK_SIZE = 16
"""Tokens per KV block."""


class Counting(DLLMStrategy):
    """Block diffusion that records how many tokens each of its forwards has."""

    tokens: list[int]

    def _room(self, rows: int) -> int:
        room = super()._room(rows)
        self.tokens.append((rows + room) * self._length)
        return room


def measure_dllm(
    model: CausalLM, rows: int, length: int, options: argparse.Namespace
) -> tuple[float, float]:
    """Return the milliseconds and the tokens of a step that unmasks two positions of each row."""
    strategy = Counting(length, unmasking="low_confidence_static", denoising_steps=length // 2)
    strategy.tokens = []
    warm = 8
    new_tokens = 2 * (options.steps + warm) + 2 * length
    config = EngineConfig(
        max_num_seqs=rows,
        max_model_len=options.context + -(-new_tokens // length) * length,
        prefix_caching=False,
        gpu_memory_utilization=0.95,
    )
    timer = StepTimer(model.device)
    engine = LLMEngine(model, None, (), strategy, config, timer=timer)
    engine.capture_graphs()
    params = SamplingParams(temperature=0, max_new_tokens=new_tokens, ignore_eos=True)
    for row in range(rows):
        engine.add_request(str(row), [row % 400, *range(1, options.context)], params)
    while engine.stats.decode_steps < warm:
        engine.step()
    timer.reset()
    strategy.tokens.clear()
    for _ in range(options.steps):
        engine.step()
    times = [step.seconds for step in timer.steps() if step.rows == rows]
    return statistics.median(times) * 1e3, statistics.mean(strategy.tokens)


def measure_ar(model: CausalLM, rows: int, width: int, options: argparse.Namespace) -> float:
    """Return the milliseconds of a forward with `width` tokens per row, and of their draws.

    Every row has `options.context` tokens in the cache before them.
    """
    device, blocks = model.device, -(-(options.context + width) // BLOCK_SIZE)
    caches = ModelUse(model, (width,)).caches(CacheSizes(1 + rows * blocks, BLOCK_SIZE, 0))
    runner = ModelRunner(model, caches)
    captured = launch_bound_tokens(model.config.num_layers, model.parameters_per_token, 8192)
    if device.type == "cuda":
        runner.capture(GraphShapes(rows, blocks, 0, captured, widths=(width,)))
    tables = torch.arange(1, 1 + rows * blocks, device=device).view(rows, blocks)
    positions = torch.arange(options.context, options.context + width, device=device).repeat(rows)
    inputs = ModelInputs(
        torch.arange(rows * width, device=device) % model.config.vocab_size,
        positions,
        tables,
        np.full(rows, width),
        np.full(rows, options.context + width),
    )
    count = rows * width
    sampling = SamplingInputs.build(
        [GREEDY] * count, [1] * count, [[1]] * count, [()] * count, [2] * count, device
    )

    def step() -> None:
        output = runner.decode(inputs)
        sample(output.logits, sampling, output.positions + 1)

    return statistics.median(event_times(step, options.ar_steps + 3, queued=False)[3:])


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--model", default="sdar-8b", help=", ".join(MODELS))
    parser.add_argument("--lengths", type=commas(int), default=[4, 32], help="of blocks")
    parser.add_argument("--batches", type=commas(int), default=[64, 256])
    parser.add_argument("--context", type=int, default=256, help="tokens of a prompt")
    parser.add_argument("--steps", type=int, default=32)
    parser.add_argument("--ar-steps", type=int, default=10)


@torch.inference_mode()
def run(options: argparse.Namespace) -> list[dict[str, Any]]:
    """Compare a step of block diffusion with autoregressive forwards of as many tokens.

    A step denoises one block of each row, and in the same forward writes the final keys and values
    of blocks that were complete before it, so it has more tokens than one block per row. The
    autoregressive forward has the same weights and reads as many tokens per row under a causal
    mask, as when drafts are verified, and draws a token for each.
    """
    model = dummy_model(options.model, DEVICE)
    found = []
    for length, rows in itertools.product(options.lengths, options.batches):
        step, tokens = measure_dllm(model, rows, length, options)
        blocks = measure_ar(model, rows, length, options)
        whole = measure_ar(model, -(-int(tokens) // length), length, options)
        print(
            f"{rows:4} rows, blocks of {length:2}: {step:7.2f} ms a step of {tokens:.0f} "
            f"tokens; autoregressive {whole:7.2f} ms for as many (ratio {whole / step:.2f}), "
            f"{blocks:7.2f} ms for the blocks alone (ratio {blocks / step:.2f})",
            flush=True,
        )
        figures = {"rows": rows, "block_length": length, "tokens": tokens}
        found.append(figures | {"dllm": step, "ar_blocks": blocks, "ar_all": whole})
    return found
