"""Compare the time of a block-diffusion step with an autoregressive forward of as many tokens.

    python scripts/bench/bench_dllm.py [--model sdar-8b] [--lengths 4,32] [--batches 64,256]

Needs a GPU. A block here is a block of positions that `dllm` decodes together. A step of `dllm`
denoises one block of each row, and in the same forward writes the final keys and values of the
blocks that were complete before it. So the forward has more tokens than one block per row. The
autoregressive forward has the same weights and reads as many tokens per row under a causal mask, as
when drafts are verified, and draws a token for each.
"""

from __future__ import annotations

import argparse
import json
import statistics
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from workloads import MODELS, dummy_model

from batchgen.engine.base.engine_config import EngineConfig
from batchgen.engine.base.step_timing import StepTimer
from batchgen.engine.caches.model_caches import CacheSizes
from batchgen.engine.execution.graph_shapes import GraphShapes, launch_bound_tokens
from batchgen.engine.execution.model_inputs import ModelInputs
from batchgen.engine.execution.model_runner import ModelRunner
from batchgen.engine.llm_engine import LLMEngine
from batchgen.engine.memory.memory_plan import ModelUse
from batchgen.engine.models.causal_lm import CausalLM
from batchgen.engine.sampling.sampler import sample
from batchgen.engine.sampling.sampling_inputs import SamplingInputs
from batchgen.engine.sampling.sampling_params import SamplingParams
from batchgen.strategies.dllm.strategy import DLLMStrategy

GREEDY = SamplingParams(temperature=0, max_new_tokens=100_000, ignore_eos=True)
BLOCK_SIZE = 16
"""Tokens per KV block."""


@dataclass(frozen=True, slots=True)
class Timing:
    """The median times of steps, in milliseconds.

    Attributes:
        rows: rows of the batch.
        block_length: positions of a row's block.
        tokens: mean number of tokens of a diffusion forward.
        dllm: time of a diffusion step of the engine.
        ar_blocks: time of an autoregressive forward with `block_length` tokens per row.
        ar_all: time of one with at least as many tokens as the diffusion forward.
    """

    rows: int
    block_length: int
    tokens: float
    dllm: float
    ar_blocks: float
    ar_all: float

    def __str__(self) -> str:
        return (
            f"{self.rows:4} rows, blocks of {self.block_length:2}: {self.dllm:7.2f} ms a step of "
            f"{self.tokens:.0f} tokens; autoregressive {self.ar_all:7.2f} ms for as many "
            f"(ratio {self.ar_all / self.dllm:.2f}), {self.ar_blocks:7.2f} ms for the blocks alone "
            f"(ratio {self.ar_blocks / self.dllm:.2f})"
        )


class Counting(DLLMStrategy):
    """Block diffusion that records how many tokens each of its forwards has."""

    tokens: list[int]

    def _room(self, rows: int) -> int:
        room = super()._room(rows)
        self.tokens.append((rows + room) * self._length)
        return room


def measure_dllm(
    model: CausalLM, rows: int, length: int, args: argparse.Namespace
) -> tuple[float, float]:
    """Return the milliseconds and the tokens of a step that unmasks two positions of each row."""
    strategy = Counting(length, unmasking="low_confidence_static", denoising_steps=length // 2)
    strategy.tokens = []
    warm = 8
    new_tokens = 2 * (args.steps + warm) + 2 * length
    config = EngineConfig(
        max_num_seqs=rows,
        max_model_len=args.context + -(-new_tokens // length) * length,
        prefix_caching=False,
        gpu_memory_utilization=0.95,
    )
    timer = StepTimer(model.device)
    engine = LLMEngine(model, None, (), strategy, config, timer=timer)
    engine.capture_graphs()
    params = SamplingParams(temperature=0, max_new_tokens=new_tokens, ignore_eos=True)
    for row in range(rows):
        engine.add_request(str(row), [row % 400, *range(1, args.context)], params)
    while engine.stats.decode_steps < warm:
        engine.step()
    timer.reset()
    strategy.tokens.clear()
    for _ in range(args.steps):
        engine.step()
    times = [step.seconds for step in timer.steps() if step.rows == rows]
    return statistics.median(times) * 1e3, statistics.mean(strategy.tokens)


def measure_ar(model: CausalLM, rows: int, width: int, args: argparse.Namespace) -> float:
    """Return the milliseconds of a forward with `width` tokens per row, and of their draws.

    Every row has `args.context` tokens in the cache before them.
    """
    device, blocks = model.device, -(-(args.context + width) // BLOCK_SIZE)
    caches = ModelUse(model, (width,)).caches(CacheSizes(1 + rows * blocks, BLOCK_SIZE, 0))
    runner = ModelRunner(model, caches)
    captured = launch_bound_tokens(model.config.num_layers, model.parameters_per_token, 8192)
    runner.capture(GraphShapes(rows, blocks, 0, captured, widths=(width,)))
    tables = torch.arange(1, 1 + rows * blocks, device=device).view(rows, blocks)
    positions = torch.arange(args.context, args.context + width, device=device).repeat(rows)
    inputs = ModelInputs(
        torch.arange(rows * width, device=device) % model.config.vocab_size,
        positions,
        tables,
        np.full(rows, width),
        np.full(rows, args.context + width),
    )
    count = rows * width
    sampling = SamplingInputs.build(
        [GREEDY] * count, [1] * count, [[1]] * count, [()] * count, [2] * count, device
    )

    def step() -> None:
        output = runner.decode(inputs)
        sample(output.logits, sampling, output.positions + 1)

    times: list[float] = []
    for _ in range(args.ar_steps + 3):
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        start.record()
        step()
        end.record()
        end.synchronize()
        times.append(start.elapsed_time(end))
    return statistics.median(times[3:])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--model", default="sdar-8b", help=", ".join(MODELS))
    parser.add_argument("--lengths", default="4,32", help="of blocks")
    parser.add_argument("--batches", default="64,256")
    parser.add_argument("--context", type=int, default=256, help="tokens of a prompt")
    parser.add_argument("--steps", type=int, default=32)
    parser.add_argument("--ar-steps", type=int, default=10)
    parser.add_argument("--json", type=Path)
    args = parser.parse_args()
    device = torch.device("cuda")
    model = dummy_model(args.model, device)
    timings: list[Timing] = []
    with torch.inference_mode():
        for length in map(int, args.lengths.split(",")):
            for rows in map(int, args.batches.split(",")):
                dllm, tokens = measure_dllm(model, rows, length, args)
                blocks = measure_ar(model, rows, length, args)
                everything = measure_ar(model, -(-int(tokens) // length), length, args)
                timings.append(Timing(rows, length, tokens, dllm, blocks, everything))
                print(timings[-1], flush=True)
    if args.json:
        figures: list[dict[str, Any]] = [asdict(timing) for timing in timings]
        args.json.write_text(json.dumps(figures, indent=1) + "\n")


if __name__ == "__main__":
    main()
