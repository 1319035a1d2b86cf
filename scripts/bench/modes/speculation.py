"""The mode speculation of bench_engine.py: equal rows with speculative and with plain decoding."""

from __future__ import annotations

import argparse
import gc
from collections import Counter
from dataclasses import replace
from typing import Any, Literal, get_args

import torch
from measuring import DEVICE, commas
from modes.routing import ROUTINGS, run_rows, set_routing
from shapes import MODELS
from torch import Tensor
from workloads import dummy_model

from batchgen.engine.execution.model_runner import ModelOutput
from batchgen.engine.interface.engine_config import EngineConfig
from batchgen.engine.interface.outputs import StepOutput
from batchgen.engine.llm_engine import LLMEngine
from batchgen.engine.rows.guide import Guide
from batchgen.engine.rows.scheduled_batch import DecodeBatch
from batchgen.engine.sampling.sampler import sample
from batchgen.engine.sampling.sampling_params import SamplingParams
from batchgen.engine.strategy import Strategy
from batchgen.kernels.sampling.token_mask import TokenMask
from batchgen.strategies.ar.strategy import ARStrategy
from batchgen.strategies.ar_spec.step_inputs import Drafts, SpecStepInputs
from batchgen.strategies.ar_spec.strategy import ARSpecStrategy
from batchgen.strategies.ar_spec.verifiers import keep_held

Proposers = Literal["ngram", "mtp"]
PROMPT_TOKENS = 128


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
    engine: LLMEngine, prompts: list[list[int]], params: SamplingParams
) -> tuple[dict[str, Any], list[list[int]]]:
    """Run all rows; returns the seconds, the counts of steps and drafts, and the tokens."""
    before, counted = engine.stats.decode_steps, Counter(engine.stats.counts)
    seconds, outputs = run_rows(engine, [(prompt, params) for prompt in prompts])
    tokens = [output.token_ids for output in outputs]
    # Plain decoding counts no drafts.
    drafts, accepted = (
        engine.stats.counts.get(count, 0) - counted[count]
        for count in ("num_draft_tokens", "num_accepted_tokens")
    )
    figures = {
        "rows": len(prompts),
        "seconds": seconds,
        "tokens": sum(map(len, tokens)),
        "forwards": engine.stats.decode_steps - before,
        "drafts": drafts,
        "accepted": accepted,
    }
    return figures, tokens


def line(name: str, one: dict[str, Any], plain: dict[str, Any]) -> str:
    seconds = one["seconds"]
    text = (
        f"  {one['rows']:4} rows, {name:<22} {seconds:7.3f} s, "
        f"{one['tokens'] / seconds:8.0f} tok/s, "
        f"{seconds / one['forwards'] * 1e3:7.3f} ms per forward"
    )
    if one["drafts"]:
        text += f", {one['accepted'] / one['drafts']:.1%} of {one['drafts']} drafts held"
    return text + (f", {plain['seconds'] / seconds:.2f} times plain" if one is not plain else "")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("what", choices=["replay"])
    parser.add_argument("--model", default="qwen3-8b", help=", ".join(MODELS))
    parser.add_argument("--routing", choices=ROUTINGS, default="model")
    parser.add_argument("--proposer", choices=get_args(Proposers), default="ngram")
    parser.add_argument("--batches", type=commas(int), default=[4, 32, 256])
    parser.add_argument("--drafts", type=int, default=3)
    parser.add_argument("--accuracy", type=float, default=0.7)
    parser.add_argument("--output-len", type=int, default=256)
    parser.add_argument("--runs", type=int, default=2)
    parser.add_argument("--kv-cache-gib", type=float, default=20.0)


def run(options: argparse.Namespace) -> list[dict[str, Any]]:
    """Draft known tokens with a model of random weights, beside plain decoding of the same rows.

    Each draft is right with a given probability, and every forward, draw and acceptance is computed
    as always. With the proposer mtp the head of the model drafts as always before its drafts are
    replaced; else drafts cost the look-up of n-grams. One engine runs after the other, since the
    states of the rows of three would not fit beside large models. A first run, which compiles
    kernels, does not count; the fastest of the others does.
    """
    model = dummy_model(options.model, DEVICE, ["mtp"] if options.proposer == "mtp" else [])
    set_routing(model, options.routing)
    config = EngineConfig(
        max_num_seqs=max(options.batches),
        max_model_len=PROMPT_TOKENS + options.output_len,
        kv_cache_gib=options.kv_cache_gib,
        prefix_caching=False,
    )
    k, found = options.drafts, []
    params = SamplingParams(temperature=0.6, max_new_tokens=options.output_len, ignore_eos=True)
    prompts = [[row, *range(300, 299 + PROMPT_TOKENS)] for row in range(max(options.batches))]
    strategies: dict[str, Strategy] = {"plain": ARStrategy()}
    for name, adaptive in ((f"always {k} drafts", False), (f"up to {k} drafts", True)):
        strategy = ReplayStrategy(options.accuracy, k, adaptive, options.proposer)
        strategies[f"{strategy.name}, {name}"] = strategy
    plain: dict[int, tuple[dict[str, Any], list[list[int]]]] = {}
    for name, own in strategies.items():
        engine = LLMEngine(model, None, (), own, config)
        engine.capture_graphs()
        print(f"{options.model}, rows of at most {options.output_len} tokens, {name}")
        for rows in options.batches:
            if isinstance(own, ReplayStrategy):
                ids = [a + b for a, b in zip(prompts, plain[rows][1], strict=False)]
                own.known = torch.tensor(ids, device=DEVICE).clamp(max=engine.vocab_size - 2)
            run_once(engine, prompts[:rows], params)
            results = [run_once(engine, prompts[:rows], params) for _ in range(options.runs)]
            best = min(results, key=lambda result: result[0]["seconds"])
            print(line(name, best[0], plain.setdefault(rows, best)[0]), flush=True)
            found.append({"name": name} | best[0])
        del engine
        gc.collect()
        torch.cuda.empty_cache()
    return found
