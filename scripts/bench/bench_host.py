"""Time what the host does in a step: the engine with a model and a sampler that cost nothing.

    python scripts/bench/bench_host.py [--rows 800] [--max-num-seqs 256] [--profile]

Scheduling, block tables, the batch's rows, stops and columns are those of the engine; forwards and
draws are skipped. Rows have 60 to 140 prompt tokens and generate 60 to 256 tokens with
log-probabilities. It runs on a CPU.
"""

from __future__ import annotations

import argparse
import cProfile
import pstats
import random
import time
from unittest import mock

import torch
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


def build_engine(max_num_seqs: int, chunk_tokens: int) -> LLMEngine:
    model = dummy_model("tiny", torch.device("cpu"))
    config = EngineConfig(
        max_num_seqs=max_num_seqs,
        max_batched_tokens=8192,
        chunk_tokens=chunk_tokens,
        kv_cache_gib=1,
        overlap=True,
    )
    with mock.patch("batchgen.engine.llm_engine.ModelRunner", FreeRunner):
        return LLMEngine(model, None, (), FreeStrategy(), config)


def run(engine: LLMEngine, rows: int) -> None:
    """Run the rows to their ends, and print the time of a step."""
    draws = random.Random(0)
    for index in range(rows):
        prompt = [draws.randrange(engine.vocab_size) for _ in range(draws.randint(60, 140))]
        params = SamplingParams(
            temperature=0.7,
            top_p=0.9,
            max_new_tokens=draws.randint(60, 256),
            seed=index,
            logprobs=True,
        )
        engine.add_request(str(index), prompt, params)
    start, steps = time.perf_counter(), 0
    while engine.has_unfinished():
        engine.step()
        steps += 1
    seconds = time.perf_counter() - start
    stats = engine.stats
    print(
        f"{steps} steps, {seconds / steps * 1e3:.2f} ms each; {stats.prefill_steps} with a "
        f"prefill, mean decode batch {stats.decode_rows / stats.decode_steps:.0f}"
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rows", type=int, default=800)
    parser.add_argument("--max-num-seqs", type=int, default=256)
    parser.add_argument("--chunk-tokens", type=int, default=0)
    parser.add_argument("--profile", action="store_true", help="print where the time goes")
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    engine = build_engine(arguments.max_num_seqs, arguments.chunk_tokens)
    profile = cProfile.Profile()
    if arguments.profile:
        profile.enable()
    run(engine, arguments.rows)
    if arguments.profile:
        profile.disable()
        pstats.Stats(profile).sort_stats("tottime").print_stats(25)


if __name__ == "__main__":
    main()
