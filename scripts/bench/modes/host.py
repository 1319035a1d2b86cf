"""The mode host of bench_engine.py: what the host does in a step."""

from __future__ import annotations

import argparse
import cProfile
import pstats
import random
import sys
from pathlib import Path
from typing import Any
from unittest import mock

import torch
from modes.routing import run_rows
from workloads import dummy_model

from batchgen.engine.base.engine_config import EngineConfig
from batchgen.engine.base.outputs import StepOutput
from batchgen.engine.execution.model_inputs import ModelInputs
from batchgen.engine.execution.model_runner import ModelOutput, ModelRunner, PrefillInputs
from batchgen.engine.llm_engine import LLMEngine
from batchgen.engine.rows.guide import Guide
from batchgen.engine.sampling.sampling_params import SamplingParams
from batchgen.engine.step_inputs import JoiningRows
from batchgen.strategies.ar.strategy import ARStrategy

sys.path.append(str(Path(__file__).parents[2] / "check"))


class FreeStrategy(ARStrategy):
    """Gives every row the same token, without looking at logits."""

    def first_tokens(self, output: ModelOutput, rows: JoiningRows) -> StepOutput:
        return self.decide(output, None)

    def decide(self, output: ModelOutput, guide: Guide | None) -> StepOutput:
        rows = len(output.positions)
        return StepOutput(
            torch.ones(rows, dtype=torch.int32),
            torch.full((rows, 1), 7),
            torch.zeros(rows, dtype=torch.bool),
            {"logprobs": torch.zeros(rows, 1)},
        )


class FreeRunner(ModelRunner):
    """Runs no forward and returns empty logits."""

    def decode(self, inputs: ModelInputs) -> ModelOutput:
        return ModelOutput(torch.empty(0), inputs.positions)

    def prefill(self, prefill: PrefillInputs, all_hidden: bool = False) -> ModelOutput:
        last = self._last_tokens(prefill.inputs, prefill.rows)
        return ModelOutput(torch.empty(0), prefill.inputs.positions[last])

    def mixed(
        self, decode: ModelInputs, prefill: PrefillInputs, all_hidden: bool = False
    ) -> tuple[ModelOutput, ModelOutput]:
        return self.decode(decode), self.prefill(prefill)


def add_host_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--rows", type=int, default=800)
    parser.add_argument("--max-num-seqs", type=int, default=256)
    parser.add_argument("--chunk-tokens", type=int, default=0)
    parser.add_argument("--profile", action="store_true", help="print where the time goes")


def run_host(options: argparse.Namespace) -> list[dict[str, Any]]:
    """Time what the host does in a step, on a CPU: forwards and draws are skipped.

    Scheduling, block tables, the batch's rows, stops and columns are those of the engine. Rows have
    60 to 140 prompt tokens and generate 60 to 256 tokens with log-probabilities.
    """
    torch.set_num_threads(1)
    config = EngineConfig(
        max_num_seqs=options.max_num_seqs,
        max_batched_tokens=8192,
        chunk_tokens=options.chunk_tokens,
        kv_cache_gib=1,
        overlap=True,
    )
    model = dummy_model("tiny", torch.device("cpu"))
    with mock.patch("batchgen.engine.llm_engine.ModelRunner", FreeRunner):
        engine = LLMEngine(model, None, (), FreeStrategy(), config)
    draws, rows, steps = random.Random(0), [], list[int]()
    for seed in range(options.rows):
        prompt = [draws.randrange(engine.vocab_size) for _ in range(draws.randint(60, 140))]
        length = draws.randint(60, 256)
        params = SamplingParams(
            temperature=0.7, top_p=0.9, max_new_tokens=length, seed=seed, logprobs=True
        )
        rows.append((prompt, params))
    profile = cProfile.Profile()
    if options.profile:
        profile.enable()
    seconds, _ = run_rows(engine, rows, steps.append)
    if options.profile:
        profile.disable()
        pstats.Stats(profile).sort_stats("tottime").print_stats(25)
    stats, each = engine.stats, seconds / len(steps) * 1e3
    mean_rows = stats.decode_rows / stats.decode_steps
    print(
        f"{len(steps)} steps, {each:.2f} ms each; {stats.prefill_steps} with a "
        f"prefill, mean decode batch {mean_rows:.0f}"
    )
    return [{"steps": len(steps), "ms_per_step": each, "mean_decode_batch": mean_rows}]
