"""Compare the time of the same rows with speculative and with plain decoding, on one GPU.

    python scripts/bench/bench_spec.py replay [--model qwen3-8b] [--accuracy 0.7] \\
        [--batches 4,32,256]
    python scripts/bench/bench_spec.py replay --model qwen3-30b-a3b --routing uniform
    python scripts/bench/bench_spec.py replay --model hybrid-35b-a3b --routing uniform \\
        --proposer mtp
    python scripts/bench/bench_spec.py ngram --model X.gguf --rows gsm8k.jsonl [--field question]

`replay` takes a model of random weights. The rows' tokens are known from a plain run, and each
draft is the known token with a given probability. So the share of accepted drafts is the one asked
for, and every forward, draw and acceptance is computed as always. With `--proposer mtp` the head of
the model reads all tokens and drafts as it always does, and only then its drafts are replaced; else
drafts cost the look-up of n-grams. `ngram` lets a real model repeat its prompt, with drafts that
are looked up in the prompt.
"""

from __future__ import annotations

import argparse
import gc
import json
import sys
import time
from collections import Counter
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any, Literal, get_args

import torch
from expert_counts import ROUTINGS, set_routing
from kernel_profile import profile_window
from torch import Tensor
from workloads import MODELS, dummy_model

from batchgen.engine.base.engine_config import EngineConfig
from batchgen.engine.base.outputs import RequestOutput, StepOutput
from batchgen.engine.execution.model_runner import ModelOutput
from batchgen.engine.llm_engine import LLMEngine
from batchgen.engine.rows.guide import Guide
from batchgen.engine.rows.scheduled_batch import DecodeBatch
from batchgen.engine.sampling.sampler import sample
from batchgen.engine.sampling.sampling_params import SamplingParams
from batchgen.engine.strategy import Strategy
from batchgen.kernels.sampling.token_mask import TokenMask
from batchgen.model.open_model import open_model
from batchgen.strategies.ar.strategy import ARStrategy
from batchgen.strategies.ar_spec.step_inputs import Drafts, SpecStepInputs
from batchgen.strategies.ar_spec.strategy import ARSpecStrategy
from batchgen.strategies.ar_spec.verifiers import keep_held

sys.path.append(str(Path(__file__).parents[1] / "check"))
from real_rows import chat_ids, read_texts

Proposers = Literal["ngram", "mtp"]
PROMPT_TOKENS = 128
PROFILED_STEPS = 10


@dataclass(frozen=True, slots=True)
class Timing:
    """One run of all rows.

    Attributes:
        name: how the rows were decoded.
        seconds: of the whole run.
        tokens: generated ones.
        forwards: decode steps.
        drafts, accepted: draft tokens that were verified, and those of them that were accepted.
    """

    name: str
    rows: int
    seconds: float
    tokens: int
    forwards: int
    drafts: int
    accepted: int

    def line(self, plain: Timing | None) -> str:
        text = (
            f"  {self.rows:4} rows, {self.name:<22} {self.seconds:7.3f} s, "
            f"{self.tokens / self.seconds:8.0f} tok/s, "
            f"{self.seconds / self.forwards * 1e3:7.3f} ms per forward"
        )
        if self.drafts:
            text += f", {self.accepted / self.drafts:.1%} of {self.drafts} drafts held"
        return text + (f", {plain.seconds / self.seconds:.2f} times plain" if plain else "")


class ReplayStrategy(ARSpecStrategy):
    """Drafts the known tokens of each row, some of them replaced by wrong ones.

    It samples as always, but then goes on with the known tokens, not with the sampled ones: wide
    and narrow forwards round differently, and one differing token would spoil all later drafts.

    Attributes:
        known: [S, L] int64, the tokens of S rows by position. A row's prompt begins with the row's
            index in this table.
    """

    def __init__(self, accuracy: float, k: int, adaptive: bool, proposer: Proposers) -> None:
        super().__init__(proposer, num_spec_tokens=k, adaptive=adaptive)
        self.known = torch.empty(0)
        self._accuracy = accuracy
        self._verify = self._replay

    def propose(self, batch: DecodeBatch) -> None:
        super().propose(batch)
        state, k = self.step_inputs, batch.width - 1
        if k:
            positions = state.positions_ahead(1 + k)[:, 1:]
            right = self._at(positions)
            # A hash of position and row, not a random number: the choice must cost nothing.
            mixed = ((positions * 7 + _keys(state).unsqueeze(1) * 13) * 2654435761) >> 12
            wrong = mixed % 1000 >= int(1000 * self._accuracy)
            counts = torch.full((len(positions),), k, dtype=torch.int32, device=positions.device)
            state.set_drafts(Drafts(right + wrong, counts))

    def _replay(
        self,
        state: SpecStepInputs,
        output: ModelOutput,
        drafts: Drafts,
        mask: TokenMask | None = None,
    ) -> StepOutput:
        width = 1 + drafts.token_ids.shape[1]
        step = sample(output.logits, state.repeated(width), output.positions + 1)
        positions = (output.positions + 1).view(-1, width)
        return keep_held(replace(step, token_ids=self._at(positions)), drafts)

    def decide(self, output: ModelOutput, guide: Guide | None) -> StepOutput:
        step = super().decide(output, guide)
        if self.step_inputs.drafts is None:
            step = replace(step, token_ids=self._at((output.positions + 1).unsqueeze(1)))
        return step

    def _at(self, positions: Tensor) -> Tensor:
        """Return the known tokens of each row at its positions [B, W]."""
        positions = positions.clamp(max=self.known.shape[1] - 1)
        return self.known[_keys(self.step_inputs).unsqueeze(1), positions]


def _keys(state: SpecStepInputs) -> Tensor:
    """Return the index [B] of each row in `ReplayStrategy.known`: the first token of its prompt."""
    return state.store.tokens[state.rows.entries_there, 0].long()


def wait_for_device() -> None:
    if torch.cuda.is_available():
        torch.cuda.synchronize()


def run(
    engine: LLMEngine, name: str, prompts: Sequence[list[int]], params: SamplingParams
) -> tuple[Timing, dict[int, RequestOutput]]:
    before, counted = engine.stats.decode_steps, Counter(engine.stats.counts)
    gc.collect()
    wait_for_device()
    start = time.perf_counter()
    for index, prompt in enumerate(prompts):
        engine.add_request(str(index), prompt, params)
    outputs: dict[int, RequestOutput] = {}
    while engine.has_unfinished():
        outputs |= {int(output.request_id): output for output in engine.step()}
    wait_for_device()
    seconds = time.perf_counter() - start
    stats = engine.stats
    timing = Timing(
        name,
        len(prompts),
        seconds,
        sum(len(output.token_ids) for output in outputs.values()),
        stats.decode_steps - before,
        # Plain decoding counts neither.
        stats.counts.get("num_draft_tokens", 0) - counted["num_draft_tokens"],
        stats.counts.get("num_accepted_tokens", 0) - counted["num_accepted_tokens"],
    )
    return timing, outputs


def timed(
    engine: LLMEngine, name: str, prompts: Sequence[list[int]], params: SamplingParams, runs: int
) -> tuple[Timing, dict[int, RequestOutput]]:
    """Return the fastest of `runs` runs, after one that compiles kernels and does not count."""
    run(engine, name, prompts, params)
    results = [run(engine, name, prompts, params) for _ in range(runs)]
    return min(results, key=lambda result: result[0].seconds)


def profile(
    engine: LLMEngine, prompts: Sequence[list[int]], params: SamplingParams, trace: Path
) -> None:
    """Print which kernels take the time of some steps, and write a Chrome trace to `trace`."""
    for index, prompt in enumerate(prompts):
        engine.add_request(str(index), prompt, params)
    for _ in range(20):
        engine.step()

    def steps() -> None:
        for _ in range(PROFILED_STEPS):
            engine.step()

    window = profile_window(steps, trace)
    print(window.table(f"{len(prompts)} rows with drafts", PROFILED_STEPS, top=30))
    for index in range(len(prompts)):
        engine.abort(str(index))


def replay(arguments: argparse.Namespace) -> list[Timing]:
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    model = dummy_model(arguments.model, device, ["mtp"] if arguments.proposer == "mtp" else [])
    set_routing(model, arguments.routing)
    config = EngineConfig(
        max_num_seqs=max(arguments.batches),
        max_model_len=PROMPT_TOKENS + arguments.output_len,
        kv_cache_gib=arguments.kv_cache_gib,
        prefix_caching=False,
    )
    k = arguments.drafts
    params = SamplingParams(temperature=0.6, max_new_tokens=arguments.output_len, ignore_eos=True)
    prompts = [[row, *range(300, 299 + PROMPT_TOKENS)] for row in range(max(arguments.batches))]
    limits = {f"always {k} drafts": False, f"up to {k} drafts": True}
    timings: list[Timing] = []
    plain: dict[int, Timing] = {}
    known: dict[int, Tensor] = {}
    # One engine after the other: the states of the rows of three would not fit beside large models.
    for name, adaptive in [("plain", None), *limits.items()]:
        strategy: Strategy = ARStrategy()
        if adaptive is not None:
            strategy = ReplayStrategy(arguments.accuracy, k, adaptive, arguments.proposer)
            name = f"{strategy.name}, {name}"
        engine = LLMEngine(model, None, (), strategy, config)
        engine.capture_graphs()
        print(f"{arguments.model}, rows of {arguments.output_len} tokens, {name}", flush=True)
        for rows in arguments.batches:
            if isinstance(strategy, ReplayStrategy):
                strategy.known = known[rows]
            timing, outputs = timed(engine, name, prompts[:rows], params, arguments.runs)
            if adaptive is None:
                plain[rows] = timing
                ids = [prompts[row] + outputs[row].token_ids for row in range(rows)]
                last = model.config.vocab_size - 2
                known[rows] = torch.tensor(ids, device=device).clamp(max=last)
            print(timing.line(None if adaptive is None else plain[rows]), flush=True)
            timings.append(timing)
            if arguments.profile and adaptive:
                trace = arguments.profile.with_name(f"{rows}-{arguments.profile.name}")
                profile(engine, prompts[:rows], params, trace)
        del engine
        gc.collect()
        torch.cuda.empty_cache()
    return timings


def ngram(arguments: argparse.Namespace) -> list[Timing]:
    opened = open_model(arguments.model, None, "auto")
    model = opened.load("bfloat16", "cuda")
    texts = read_texts(arguments.rows, arguments.field, max(arguments.batches))
    timings: list[Timing] = []
    for rows in arguments.batches:
        prompts = [
            chat_ids(opened.tokenizer, f"Repeat this text word for word:\n\n{text}")
            for text in texts[:rows]
        ]
        params = SamplingParams(temperature=0, max_new_tokens=arguments.output_len)
        config = EngineConfig(max_num_seqs=rows, max_model_len=2048, prefix_caching=False)
        config = replace(config, kv_cache_gib=arguments.kv_cache_gib)
        print(f"{Path(arguments.model).name}, {rows} rows to copy", flush=True)
        plain: Timing | None = None
        same: dict[int, RequestOutput] = {}
        k = arguments.drafts
        strategies: dict[str, Strategy] = {
            "plain": ARStrategy(),
            f"ngram, {k} drafts": ARSpecStrategy(num_spec_tokens=k, adaptive=False),
            f"ngram, up to {k}": ARSpecStrategy(num_spec_tokens=k),
        }
        for name, strategy in strategies.items():
            engine = opened.engine(model, strategy, config)
            engine.capture_graphs()
            timing, outputs = timed(engine, name, prompts, params, arguments.runs)
            print(timing.line(plain), flush=True)
            timings.append(timing)
            plain, same = plain or timing, same or outputs
            differ = sum(outputs[i].token_ids != same[i].token_ids for i in outputs)
            if differ:
                print(f"    {differ} of {len(outputs)} rows differ from plain (bfloat16)")
    return timings


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("what", choices=["replay", "ngram"])
    parser.add_argument("--model", default="qwen3-8b", help=f"replay: {', '.join(MODELS)}")
    parser.add_argument("--rows", type=Path, help="ngram: JSONL")
    parser.add_argument("--field", default="question")
    parser.add_argument(
        "--routing", choices=ROUTINGS, default="model", help="replay: who chooses experts"
    )
    parser.add_argument(
        "--proposer",
        choices=get_args(Proposers),
        default="ngram",
        help="replay: who drafts before the drafts are replaced",
    )
    parser.add_argument("--batches", default="4,32,256")
    parser.add_argument("--drafts", type=int, default=3)
    parser.add_argument("--accuracy", type=float, default=0.7)
    parser.add_argument("--output-len", type=int, default=256)
    parser.add_argument("--runs", type=int, default=2)
    parser.add_argument("--kv-cache-gib", type=float, default=20.0)
    parser.add_argument("--profile", type=Path, help="replay: a trace of ten steps of each batch")
    parser.add_argument("--json", type=Path)
    arguments = parser.parse_args()
    arguments.batches = [int(part) for part in arguments.batches.split(",")]
    if arguments.what == "ngram" and arguments.rows is None:
        parser.error("ngram needs --rows")
    timings = replay(arguments) if arguments.what == "replay" else ngram(arguments)
    if arguments.json:
        figures: list[dict[str, Any]] = [asdict(timing) for timing in timings]
        arguments.json.write_text(json.dumps(figures, indent=1) + "\n")


if __name__ == "__main__":
    main()
