"""Speculative decoding against decoding without, over real prompts.

The prompts are chat questions, and requests to repeat a text, which is drafted well by looking it
up. Each is answered greedily and twice with other options, all mixed in one batch; rows are
chunked, share prefixes and are preempted in a cache too small for them.

float32: every token must be the one that `ar` gives in its simplest loop, and every
log-probability the same up to 1e-4. bfloat16: nobody is exact, so the share of the rows that differ
is reported.

    python scripts/check/check_spec.py ROWS.jsonl [--device cuda] [--dtype bfloat16] [--prompts 32]
"""

from __future__ import annotations

import argparse
import itertools
import random
import time
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
import torch
from real_rows import chat_ids, comparison_arguments, read_texts
from transformers.utils.logging import disable_progress_bar, set_verbosity_error

from batchgen.engine.cache.memory_plan import kv_bytes_per_block
from batchgen.engine.engine_config import EngineConfig
from batchgen.engine.llm_engine import EngineStats, LLMEngine
from batchgen.engine.models.dense import DenseForCausalLM
from batchgen.engine.models.llama import LlamaForCausalLM
from batchgen.engine.outputs import RequestOutput
from batchgen.engine.sampling.params import SamplingParams
from batchgen.engine.strategy import Strategy
from batchgen.model.open_model import OpenedModel, open_model
from batchgen.strategies.ar.strategy import ARStrategy
from batchgen.strategies.ar_spec.strategy import ARSpecStrategy

GREEDY = SamplingParams(temperature=0, logprobs=True)
OTHERS: tuple[dict[str, Any], ...] = (
    {"temperature": 0.3},
    {"temperature": 0.8, "top_k": 40, "top_p": 0.9, "top_logprobs": 3},
    {"temperature": 1.2, "min_p": 0.05, "repetition_penalty": 1.2},
    {"presence_penalty": 0.5, "frequency_penalty": 0.5, "logprobs_mode": "processed"},
    {"temperature": 0.2, "min_new_tokens": 16, "stop": (" the", "\n\n")},
    {"temperature": 0.5, "top_p": 0.8, "ignore_eos": True},
)
LOGPROB_LIMIT = 1e-4
COLUMNS = ("draft_accepted", "step_map")
Request = tuple[list[int], SamplingParams]


@dataclass(frozen=True)
class Case:
    """A way to run.

    Attributes:
        draft: the proposer `draft` with `random`, a small model of random weights; `rough`, the
            model with noise on its weights; or `perfect`, the model itself. None is n-grams.
        hard: chunked prefills and a cache in which rows preempt each other.
        any_width: each step has a random number of drafts, none too.
    """

    k: int
    draft: str | None = None
    pool: bool = False
    hard: bool = False
    overlap: bool = False
    any_width: bool = False

    def __str__(self) -> str:
        names = {"pool": self.pool, "hard": self.hard, "overlap": self.overlap}
        flags = [name for name, on in names.items() if on]
        if self.any_width:
            flags.append("any width")
        return ", ".join([f"{self.draft or 'ngram'} k={self.k}", *flags])

    def strategy(self) -> ARSpecStrategy:
        kind = AnyWidth if self.any_width else ARSpecStrategy
        return kind(
            proposer="ngram" if self.draft is None else "draft",
            num_spec_tokens=self.k,
            adaptive=False,
            ngram_pool=self.pool,
        )


class AnyWidth(ARSpecStrategy):
    """Chooses among its widths at random."""

    def __init__(self, **options: Any) -> None:
        super().__init__(**options)
        self._random = random.Random(0)

    def step_width(self, num_rows: int) -> int:
        return self._random.choice(self.widths)


CASES = (
    Case(3),
    Case(1, overlap=True),
    Case(5, hard=True, any_width=True),
    Case(7, hard=True, overlap=True),
    Case(5, pool=True, hard=True),
    Case(3, "random", hard=True),
    Case(7, "random", overlap=True),
    Case(1, "rough", hard=True, overlap=True),
    Case(5, "rough", hard=True, any_width=True),
    Case(3, "perfect"),
    Case(7, "perfect", hard=True, overlap=True),
)


def main() -> None:
    args = comparison_arguments("Compare ar_spec with ar over real prompts, each in two ways.")

    disable_progress_bar()
    set_verbosity_error()
    opened = open_model(args.model, None, "auto")
    check = Check(
        opened,
        lambda: opened.load(args.dtype, args.device),
        make_requests(opened, args),
        exact=args.dtype == "float32",
    )
    raise SystemExit(0 if check() else 1)


def make_requests(opened: OpenedModel, args: argparse.Namespace) -> list[Request]:
    """Three rows for each prompt: greedy, and two samples of the same options."""
    others = itertools.cycle(OTHERS)
    requests: list[Request] = []
    for text in read_texts(args.rows, args.field, args.prompts):
        for content in (text, f"Repeat the following text word for word:\n\n{text}"):
            prompt = chat_ids(opened.tokenizer, content)
            base = replace(GREEDY, max_new_tokens=args.new_tokens)
            other = replace(base, **({"temperature": 1.0} | next(others)))
            # The seed is of the row, whatever runs beside it.
            requests += [
                (prompt, replace(params, seed=len(requests) + i))
                for i, params in enumerate((base, other, other))
            ]
    return requests


@dataclass
class Check:
    """Runs every case and compares it with `ar`.

    Attributes:
        load: makes the model, a copy each time.
        exact: whether rows must be equal.
    """

    opened: OpenedModel
    load: Callable[[], DenseForCausalLM]
    requests: list[Request]
    exact: bool
    _drafts: dict[str, DenseForCausalLM] = field(default_factory=dict)

    def __call__(self) -> bool:
        model = self.load()
        self._drafts = {
            "random": random_model(model),
            "rough": add_noise(self.load(), 0.12, 0.0),
            "perfect": self.load(),
        }
        simple = EngineConfig(prefix_caching=False, overlap=False, chunk_tokens=0)
        start = time.perf_counter()
        expected, _ = self._run(model, None, ARStrategy(), simple)
        tokens = sum(len(output.token_ids) for output in expected)
        print(
            f"{len(expected)} rows, {tokens} tokens, without drafts in "
            f"{time.perf_counter() - start:.0f} s"
        )
        on_gpu = model.device.type == "cuda"
        passed, preemptions, cached = True, 0, 0
        for case in CASES:
            start = time.perf_counter()
            draft = self._drafts[case.draft] if case.draft else None
            config = replace(simple, prefix_caching=True, overlap=case.overlap)
            if case.hard:
                config = self._hard_config(model, draft, config)
            outputs, stats = self._run(model, draft, case.strategy(), config)
            different, worst = compare(expected, outputs)
            forwards = sum(output.num_forwards for output in outputs)
            offered = sum(output.num_draft_tokens for output in outputs)
            accepted = sum(output.num_accepted_tokens for output in outputs)
            print(
                f"{case!s:<36} {different} of {len(outputs)} rows differ, log-probabilities by "
                f"up to {worst:.1e}; {accepted / max(offered, 1):.0%} of {offered} drafts held, "
                f"{tokens / forwards:.2f} tokens per forward; {stats.preemptions} preemptions, "
                f"{stats.cached_tokens} tokens cached, {time.perf_counter() - start:.0f} s",
                flush=True,
            )
            if self.exact:
                passed &= not different and worst < LOGPROB_LIMIT
                passed &= accepted > 0 or case.draft == "random"
                # A GPU rounds wider products otherwise, and a draw may all but tie.
                if case.draft == "perfect" and not case.hard and not on_gpu:
                    fewest = sum(
                        1 + -(-(len(output.token_ids) - 1) // (1 + case.k)) for output in outputs
                    )
                    print(f"  at least {fewest} forwards were needed, {forwards} were done")
                    passed &= forwards == fewest
            preemptions += stats.preemptions
            cached += stats.cached_tokens
        if not preemptions or not cached:
            print("too easy: nothing was preempted, or nothing came from the prefix cache")
        return passed and preemptions > 0 and cached > 0

    def _hard_config(
        self, model: DenseForCausalLM, draft: DenseForCausalLM | None, config: EngineConfig
    ) -> EngineConfig:
        """Small chunks, and a cache that holds little more than the prompts of the rows in
        flight."""
        size, rows = config.block_size, min(17, len(self.requests) // 2)
        prompts = [len(prompt) for prompt, _ in self.requests]
        longest = max(len(prompt) + params.max_new_tokens for prompt, params in self.requests)
        # Three rows share a prompt; each has blocks of its own for what is generated.
        blocks = rows * (sum(prompts) / len(prompts) / size / 3 + 2)
        models = [model] if draft is None else [model, draft]
        per_block = sum(kv_bytes_per_block(each.config, size, each.dtype) for each in models)
        num_blocks = 1.5 + max(-(-longest // size), round(blocks))
        return replace(
            config,
            max_num_seqs=rows,
            max_batched_tokens=100,
            chunk_tokens=32,
            kv_cache_gib=num_blocks * per_block / 2**30,
        )

    def _run(
        self,
        model: DenseForCausalLM,
        draft: DenseForCausalLM | None,
        strategy: Strategy,
        config: EngineConfig,
    ) -> tuple[list[RequestOutput], EngineStats]:
        """The outputs in the order of the requests."""
        opened = self.opened
        engine = LLMEngine(
            model, opened.tokenizer, opened.eos_token_ids, strategy, config, draft=draft
        )
        columns = tuple(column.name for column in strategy.columns)
        # Short rows come first, so that the scheduler expects as little of the others and admits
        # more of them than the cache can hold.
        short = SamplingParams(temperature=0, max_new_tokens=2)
        for index in range(config.max_num_seqs if config.chunk_tokens else 0):
            engine.add_request(f"short {index}", self.requests[0][0][:8], short)
        for index, (prompt, params) in enumerate(self.requests):
            engine.add_request(str(index), prompt, replace(params, columns=columns))
        outputs: dict[str, RequestOutput] = {}
        while engine.has_unfinished():
            outputs |= {output.request_id: output for output in engine.step()}
        return [outputs[str(index)] for index in range(len(self.requests))], engine.stats


def compare(expected: list[RequestOutput], outputs: list[RequestOutput]) -> tuple[int, float]:
    """How many rows differ in their tokens, their end or what must follow from their columns, and
    the largest difference of a log-probability of the others."""
    different, worst = 0, 0.0
    for one, other in zip(expected, outputs, strict=True):
        if not same_tokens(one, other) or not consistent(other):
            different += 1
            continue
        for name, values in one.columns.items():
            if values.dtype.kind == "f":
                # Excluded tokens are -inf in both.
                same = values == other.columns[name]
                gaps = np.abs(np.where(same, 0, values - np.where(same, 0, other.columns[name])))
                worst = max(worst, float(gaps.max()))
    return different, worst


def same_tokens(one: RequestOutput, other: RequestOutput) -> bool:
    return (one.token_ids, one.text, one.finish_reason, one.stop) == (
        other.token_ids,
        other.text,
        other.finish_reason,
        other.stop,
    )


def consistent(output: RequestOutput) -> bool:
    """Whether the columns of speculation and the row's counts tell the same."""
    accepted, steps = (output.columns[name] for name in COLUMNS)
    # A forward commits drafts and then one token of its own, which a stop may cut off.
    ends = steps[1:] > steps[:-1]
    rises = np.diff(steps, prepend=0)
    return bool(
        np.isin(rises, (0, 1)).all()
        and (ends == ~accepted[:-1]).all()
        and steps[-1] == output.num_forwards
        and accepted.sum() == output.num_accepted_tokens <= output.num_draft_tokens
    )


def random_model(model: DenseForCausalLM) -> DenseForCausalLM:
    """Two small layers over the vocabulary of the model."""
    config = replace(
        model.config,
        num_layers=2,
        hidden_size=64,
        num_heads=4,
        num_kv_heads=2,
        head_dim=16,
        intermediate_size=128,
        tie_word_embeddings=True,
        attention_bias=False,
        mlp_bias=False,
        qk_norm=False,
    )
    draft = LlamaForCausalLM(config, device=model.device, dtype=model.dtype)
    for slot in draft.checkpoint_slots().values():
        slot.zero_()
    return add_noise(draft, 0.0, 0.3)


def add_noise(model: DenseForCausalLM, relative: float, absolute: float) -> DenseForCausalLM:
    """Normal noise on every weight, in proportion to the tensor's deviation and beyond it."""
    generator = torch.Generator().manual_seed(0)
    for _, slot in sorted(model.checkpoint_slots().items()):
        deviation = absolute + relative * (slot.float().std().item() if slot.numel() > 1 else 0)
        noise = torch.empty(slot.shape).normal_(0, deviation, generator=generator)
        slot.add_(noise.to(slot))
    return model


if __name__ == "__main__":
    main()
