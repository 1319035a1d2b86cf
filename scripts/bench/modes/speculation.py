"""The mode speculation of bench_engine.py: equal rows with speculative and with plain decoding."""

from __future__ import annotations

import argparse
import gc
import sys
from collections import Counter
from collections.abc import Callable
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any, Literal, get_args

import torch
from measuring import DEVICE, commas
from modes.routing import ROUTINGS, run_rows, set_routing
from torch import Tensor
from workloads import MODELS, dummy_model

from batchgen.engine.base.engine_config import EngineConfig
from batchgen.engine.base.outputs import StepOutput
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

sys.path.append(str(Path(__file__).parents[2] / "check"))
from real_rows import chat_ids, read_texts

Proposers = Literal["ngram", "mtp"]
PROMPT_TOKENS = 128


@dataclass(frozen=True, slots=True)
class Timing:
    """One run of all rows: generated tokens, decode steps, verified drafts and accepted ones."""

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
    `known` [S, L] int64 holds the tokens of S rows by position; a row's prompt begins with its
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
            mixed = ((positions * 7 + self._keys().unsqueeze(1) * 13) * 2654435761) >> 12
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

    def _keys(self) -> Tensor:
        """Return the index [B] of each row in `known`: the first token of its prompt."""
        state = self.step_inputs
        return state.store.tokens[state.rows.entries_there, 0].long()

    def _at(self, positions: Tensor) -> Tensor:
        """Return the known tokens of each row at its positions [B, W]."""
        positions = positions.clamp(max=self.known.shape[1] - 1)
        return self.known[self._keys().unsqueeze(1), positions]


def run_once(
    engine: LLMEngine, name: str, prompts: list[list[int]], params: SamplingParams
) -> tuple[Timing, list[list[int]]]:
    before, counted = engine.stats.decode_steps, Counter(engine.stats.counts)
    seconds, outputs = run_rows(engine, [(prompt, params) for prompt in prompts])
    stats, tokens = engine.stats, [output.token_ids for output in outputs]
    # Plain decoding counts no drafts.
    drafts, accepted = (
        stats.counts.get(count, 0) - counted[count]
        for count in ("num_draft_tokens", "num_accepted_tokens")
    )
    steps = stats.decode_steps - before
    timing = Timing(name, len(prompts), seconds, sum(map(len, tokens)), steps, drafts, accepted)
    return timing, tokens


def compare(
    options: argparse.Namespace,
    strategies: dict[str, Strategy],
    engine_of: Callable[[Strategy], LLMEngine],
    prompts: list[list[int]],
    batches: list[int],
    params: SamplingParams,
) -> list[Timing]:
    """Time the same rows with one strategy after the other, of which the first one is plain.

    One engine after the other: the states of the rows of three would not fit beside large models.
    A first run, which compiles kernels, does not count; the fastest of the others does.
    """
    timings: list[Timing] = []
    plain: dict[int, Timing] = {}
    known: dict[int, list[list[int]]] = {}
    for name, strategy in strategies.items():
        engine = engine_of(strategy)
        engine.capture_graphs()
        print(f"{options.model}, rows of at most {params.max_new_tokens} tokens, {name}")
        for rows in batches:
            if isinstance(strategy, ReplayStrategy):
                ids = [a + b for a, b in zip(prompts, known[rows], strict=False)]
                last = engine.vocab_size - 2
                strategy.known = torch.tensor(ids, device=DEVICE).clamp(max=last)
            run_once(engine, name, prompts[:rows], params)
            results = [run_once(engine, name, prompts[:rows], params) for _ in range(options.runs)]
            timing, tokens = min(results, key=lambda result: result[0].seconds)
            print(timing.line(plain.get(rows)), flush=True)
            plain.setdefault(rows, timing)
            first = known.setdefault(rows, tokens)
            differ = sum(a != b for a, b in zip(tokens, first, strict=True))
            if differ and not isinstance(strategy, ReplayStrategy):
                print(f"    {differ} of {rows} rows differ from plain (bfloat16)")
            timings.append(timing)
        del engine
        gc.collect()
        torch.cuda.empty_cache()
    return timings


def run_replay(options: argparse.Namespace) -> list[dict[str, Any]]:
    """Draft known tokens with a model of random weights: each draft is right with a given
    probability, and every forward, draw and acceptance is computed as always. With the proposer mtp
    the head of the model drafts as always before its drafts are replaced; else drafts cost the
    look-up of n-grams."""
    model = dummy_model(options.model, DEVICE, ["mtp"] if options.proposer == "mtp" else [])
    set_routing(model, options.routing)
    config = EngineConfig(
        max_num_seqs=max(options.batches),
        max_model_len=PROMPT_TOKENS + options.output_len,
        kv_cache_gib=options.kv_cache_gib,
        prefix_caching=False,
    )
    k = options.drafts
    params = SamplingParams(temperature=0.6, max_new_tokens=options.output_len, ignore_eos=True)
    prompts = [[row, *range(300, 299 + PROMPT_TOKENS)] for row in range(max(options.batches))]
    strategies: dict[str, Strategy] = {"plain": ARStrategy()}
    for name, adaptive in ((f"always {k} drafts", False), (f"up to {k} drafts", True)):
        strategy = ReplayStrategy(options.accuracy, k, adaptive, options.proposer)
        strategies[f"{strategy.name}, {name}"] = strategy

    def engine_of(strategy: Strategy) -> LLMEngine:
        return LLMEngine(model, None, (), strategy, config)

    found = compare(options, strategies, engine_of, prompts, options.batches, params)
    return [asdict(timing) for timing in found]


def run_ngram(options: argparse.Namespace) -> list[dict[str, Any]]:
    """Let a real model repeat its prompt, with drafts that are looked up in the prompt."""
    opened = open_model(options.model, None, "auto")
    model = opened.load("auto" if DEVICE.type == "cpu" else "bfloat16", "auto")
    texts = read_texts(options.rows, options.field, max(options.batches))
    prompts = [
        chat_ids(opened.tokenizer, f"Repeat this text word for word:\n\n{text}") for text in texts
    ]
    params, k = SamplingParams(temperature=0, max_new_tokens=options.output_len), options.drafts
    found: list[Timing] = []
    for rows in options.batches:
        config = EngineConfig(max_num_seqs=rows, max_model_len=2048, prefix_caching=False)
        config = replace(config, kv_cache_gib=options.kv_cache_gib)
        strategies: dict[str, Strategy] = {
            "plain": ARStrategy(),
            f"ngram, {k} drafts": ARSpecStrategy(num_spec_tokens=k, adaptive=False),
            f"ngram, up to {k}": ARSpecStrategy(num_spec_tokens=k),
        }

        def engine_of(strategy: Strategy, config: EngineConfig = config) -> LLMEngine:
            return opened.engine(model, strategy, config)

        found += compare(options, strategies, engine_of, prompts, [rows], params)
    return [asdict(timing) for timing in found]


def add_speculation_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("what", choices=["replay", "ngram"])
    parser.add_argument("--model", default="qwen3-8b", help=f"replay: {', '.join(MODELS)}")
    parser.add_argument("--rows", type=Path, help="ngram: JSONL")
    parser.add_argument("--field", default="question")
    parser.add_argument("--routing", choices=ROUTINGS, default="model", help="replay")
    parser.add_argument("--proposer", choices=get_args(Proposers), default="ngram", help="replay")
    parser.add_argument("--batches", type=commas(int), default=[4, 32, 256])
    parser.add_argument("--drafts", type=int, default=3)
    parser.add_argument("--accuracy", type=float, default=0.7)
    parser.add_argument("--output-len", type=int, default=256)
    parser.add_argument("--runs", type=int, default=2)
    parser.add_argument("--kv-cache-gib", type=float, default=20.0)


def run_speculation(options: argparse.Namespace) -> list[dict[str, Any]]:
    if options.what == "ngram" and options.rows is None:
        raise SystemExit("ngram needs --rows")
    return run_replay(options) if options.what == "replay" else run_ngram(options)
