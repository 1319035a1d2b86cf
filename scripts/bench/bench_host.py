"""What a step costs the host: the engine on a CPU with a model and a sampler that cost nothing.

    python scripts/bench/bench_host.py [--rows 800] [--max-num-seqs 256] [--profile]

Scheduling, block tables, the batch's rows, stops and columns are real; forwards and draws are not.
Rows have 60 to 140 prompt tokens and generate 60 to 256, with log-probabilities.
"""

from __future__ import annotations

import argparse
import cProfile
import pstats
import random
import tempfile
import time
from pathlib import Path
from unittest import mock

import numpy as np
import numpy.typing as npt
import torch
from workloads import write_config

from batchgen.engine.constraint.guide import Guide
from batchgen.engine.engine_config import EngineConfig
from batchgen.engine.execution.model_inputs import ModelInputs
from batchgen.engine.execution.model_runner import ModelOutput, ModelRunner
from batchgen.engine.llm_engine import LLMEngine
from batchgen.engine.loading.loader import load_model
from batchgen.engine.outputs import StepOutput
from batchgen.engine.sampling.params import SamplingParams
from batchgen.engine.strategy import JoiningRows
from batchgen.strategies.ar.strategy import ARStrategy


class FreeStrategy(ARStrategy):
    """Decides without looking at logits."""

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
    """Runs no forward."""

    def decode(self, inputs: ModelInputs) -> ModelOutput:
        return ModelOutput(torch.empty(0), inputs.positions)

    def prefill(
        self, inputs: ModelInputs, rows: npt.NDArray[np.int64], all_hidden: bool = False
    ) -> ModelOutput:
        return ModelOutput(torch.empty(0), inputs.positions[self._last_tokens(inputs, rows)])

    def mixed(
        self, decode: ModelInputs, prefill: ModelInputs, rows: npt.NDArray[np.int64]
    ) -> tuple[ModelOutput, ModelOutput]:
        return self.decode(decode), self.prefill(prefill, rows)


def build_engine(max_num_seqs: int, chunk_tokens: int) -> LLMEngine:
    device = torch.device("cpu")
    with tempfile.TemporaryDirectory() as folder:
        path = write_config("tiny", Path(folder))
        model = load_model(path, device=device, dtype=torch.float32, load_format="dummy")
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
    parser = argparse.ArgumentParser(description=__doc__)
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
