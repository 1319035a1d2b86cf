"""Modes of bench_engine.py that time decode steps: speculation, dllm and constraint."""

from __future__ import annotations

import argparse
import gc
import random
import statistics
import sys
import time
from collections import Counter
from collections.abc import Callable, Iterable
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any, Literal, get_args

import numpy as np
import torch
from measuring import DEVICE, commas, event_times, profile_window
from routing import ROUTINGS, run_rows, set_routing
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from torch import Tensor
from transformers import AutoTokenizer, PreTrainedTokenizerBase, PreTrainedTokenizerFast
from workloads import MODELS, dummy_model

from batchgen.engine.base.engine_config import EngineConfig
from batchgen.engine.base.outputs import StepOutput
from batchgen.engine.base.step_timing import StepTimer
from batchgen.engine.caches.model_caches import CacheSizes
from batchgen.engine.constraint.compiler import GrammarCompiler
from batchgen.engine.constraint.constraint import Constraint
from batchgen.engine.execution.graph_shapes import GraphShapes, launch_bound_tokens
from batchgen.engine.execution.model_inputs import ModelInputs
from batchgen.engine.execution.model_runner import ModelOutput, ModelRunner
from batchgen.engine.llm_engine import LLMEngine
from batchgen.engine.memory.memory_plan import ModelUse
from batchgen.engine.models.causal_lm import CausalLM
from batchgen.engine.rows.guide import Guide
from batchgen.engine.rows.scheduled_batch import DecodeBatch
from batchgen.engine.sampling.sampler import sample
from batchgen.engine.sampling.sampling_inputs import SamplingInputs
from batchgen.engine.sampling.sampling_params import SamplingParams
from batchgen.engine.strategy import Strategy
from batchgen.kernels.sampling.token_mask import TokenMask
from batchgen.model.open_model import open_model
from batchgen.strategies.ar.strategy import ARStrategy
from batchgen.strategies.ar_spec.step_inputs import Drafts, SpecStepInputs
from batchgen.strategies.ar_spec.strategy import ARSpecStrategy
from batchgen.strategies.ar_spec.verifiers import keep_held
from batchgen.strategies.dllm.strategy import DLLMStrategy

sys.path.append(str(Path(__file__).parents[1] / "check"))
from real_rows import chat_ids, read_texts

Proposers = Literal["ngram", "mtp"]
PROMPT_TOKENS = 128
PROFILED_STEPS = 10


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
        self.known, self.controlled = torch.empty(0), adaptive
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
            if options.profile and isinstance(strategy, ReplayStrategy) and strategy.controlled:
                trace = options.profile.with_name(f"{rows}-{options.profile.name}")
                profile_steps(engine, prompts[:rows], params, trace)
        del engine
        gc.collect()
        torch.cuda.empty_cache()
    return timings


def profile_steps(
    engine: LLMEngine, prompts: list[list[int]], params: SamplingParams, trace: Path
) -> None:
    """Print which kernels take the time of some steps, and write a Chrome trace."""
    for index, prompt in enumerate(prompts):
        engine.add_request(str(index), prompt, params)
    for _ in range(20):
        engine.step()
    window = profile_window(lambda: [engine.step() for _ in range(PROFILED_STEPS)], trace)
    print(window.table(f"{len(prompts)} rows with drafts", PROFILED_STEPS, top=30))
    for index in range(len(prompts)):
        engine.abort(str(index))


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
    parser.add_argument("--profile", type=Path, help="replay: a trace of ten steps of each batch")


def run_speculation(options: argparse.Namespace) -> list[dict[str, Any]]:
    if options.what == "ngram" and options.rows is None:
        raise SystemExit("ngram needs --rows")
    return run_replay(options) if options.what == "replay" else run_ngram(options)


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


def add_dllm_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--model", default="sdar-8b", help=", ".join(MODELS))
    parser.add_argument("--lengths", type=commas(int), default=[4, 32], help="of blocks")
    parser.add_argument("--batches", type=commas(int), default=[64, 256])
    parser.add_argument("--context", type=int, default=256, help="tokens of a prompt")
    parser.add_argument("--steps", type=int, default=32)
    parser.add_argument("--ar-steps", type=int, default=10)


@torch.inference_mode()
def run_dllm(options: argparse.Namespace) -> list[dict[str, Any]]:
    """Compare a step of block diffusion with autoregressive forwards of as many tokens.

    A step denoises one block of each row, and in the same forward writes the final keys and values
    of blocks that were complete before it, so it has more tokens than one block per row. The
    autoregressive forward has the same weights and reads as many tokens per row under a causal
    mask, as when drafts are verified, and draws a token for each.
    """
    model = dummy_model(options.model, DEVICE)
    found = []
    for length in options.lengths:
        for rows in options.batches:
            step, tokens = measure_dllm(model, rows, length, options)
            blocks = measure_ar(model, rows, length, options)
            whole = measure_ar(model, -(-int(tokens) // length), length, options)
            print(
                f"{rows:4} rows, blocks of {length:2}: {step:7.2f} ms a step of {tokens:.0f} "
                f"tokens; autoregressive {whole:7.2f} ms for as many (ratio {whole / step:.2f}), "
                f"{blocks:7.2f} ms for the blocks alone (ratio {blocks / step:.2f})",
                flush=True,
            )
            found.append(
                {
                    "rows": rows,
                    "block_length": length,
                    "tokens": tokens,
                    "dllm": step,
                    "ar_blocks": blocks,
                    "ar_all": whole,
                }
            )
    return found


WARM_STEPS = 16
PERSON: dict[str, Any] = {
    "type": "object",
    "properties": {
        "name": {"type": "string"},
        "age": {"type": "integer", "minimum": 0, "maximum": 120},
        "role": {"enum": ["author", "reader", "editor"]},
        "notes": {"type": "array", "items": {"type": "string"}},
    },
    "required": ["name", "age", "role", "notes"],
    "additionalProperties": False,
}
SCHEMA: dict[str, Any] = {
    "type": "object",
    # A hundred people, so that no row ends.
    "properties": {"people": {"type": "array", "minItems": 100, "items": PERSON}},
    "required": ["people"],
    "additionalProperties": False,
}


def widened(tokenizer: PreTrainedTokenizerBase, size: int) -> PreTrainedTokenizerFast:
    """Make a byte-level tokenizer for a model with `size` logits, from pairs of its tokens.

    It has 256 ids less than that, since models have more logits than their tokenizers have ids.
    """
    draws = random.Random(0)
    special = set(tokenizer.all_special_tokens)
    words = [word for word in tokenizer.get_vocab() if word not in special]
    vocab = {word: i for i, word in enumerate(words)}
    while len(vocab) < size - 256 - len(special):
        vocab.setdefault(draws.choice(words) + draws.choice(words), len(vocab))
    raw = Tokenizer(models.BPE(vocab, []))
    raw.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    raw.decoder = decoders.ByteLevel()
    return PreTrainedTokenizerFast(tokenizer_object=raw, eos_token=tokenizer.eos_token)


def full_steps(
    engine: LLMEngine, timer: StepTimer, params: list[SamplingParams], steps: int
) -> dict[str, float]:
    """Run all rows together, and return medians of decode steps that had all of them, in ms."""
    rows = len(params)
    for row, own in enumerate(params):
        prompt = [(row * 31 + i * 7) % 1000 for i in range(PROMPT_TOKENS)]
        engine.add_request(str(row), prompt, own)
    before = engine.stats.decode_steps
    while engine.stats.decode_steps < before + WARM_STEPS:
        engine.step()
    timer.reset()
    for _ in range(steps):
        engine.step()
    times = [step for step in timer.steps() if step.kind == "decode" and step.rows == rows]
    for row in range(rows):
        engine.abort(str(row))
    while engine.has_unfinished():
        engine.step()
    if len(times) < steps // 2:
        raise RuntimeError(f"only {len(times)} of {steps} steps had all {rows} rows: rows ended")

    def median(values: Iterable[float]) -> float:
        return statistics.median(values) * 1e3

    return {
        "steps": len(times) - 1,
        "device": median(step.seconds for step in times[1:]),
        "waiting": median(step.idle_before for step in times[1:]),
        "step": median(step.seconds + step.idle_before for step in times[1:]),
    }


def add_constraint_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--tokenizer", required=True, help="folder")
    parser.add_argument("--model", default="qwen3-8b", help=", ".join(MODELS))
    parser.add_argument("--rows", type=int, default=256)
    parser.add_argument("--steps", type=int, default=100)
    parser.add_argument("--vocab-sizes", type=commas(int), default=[49152, 151936])
    parser.add_argument("--kv-cache-gib", type=float, default=24.0)


def run_constraint(options: argparse.Namespace) -> list[dict[str, Any]]:
    """Let a model of random weights write JSON of a schema with free strings, whose grammar states
    are the costliest ones to compute masks for."""
    base, found = AutoTokenizer.from_pretrained(options.tokenizer), []
    for vocab_size in options.vocab_sizes:
        tokenizer = base if vocab_size < 2 * len(base) else widened(base, vocab_size)
        assert tokenizer.eos_token_id is not None
        eos = (int(tokenizer.eos_token_id),)
        model = dummy_model(options.model, DEVICE, vocab_size=vocab_size)
        compiler = GrammarCompiler(tokenizer, vocab_size, eos)
        constraint = Constraint.make("json_schema", SCHEMA)
        start = time.perf_counter()
        compiler.compile(constraint)
        print(f"compiled in {time.perf_counter() - start:.3f} s")
        config = EngineConfig(
            max_num_seqs=options.rows, max_model_len=2048, kv_cache_gib=options.kv_cache_gib
        )
        # Rows also decode while others are still prefilled.
        longest = options.steps + WARM_STEPS + options.rows // 2
        timer = StepTimer(DEVICE)
        engine = LLMEngine(model, tokenizer, eos, ARStrategy(), config, timer, compiler=compiler)
        for sampling in (SamplingParams(temperature=0), SamplingParams(temperature=1, top_p=0.95)):
            kind = "greedy" if sampling.greedy else "sampled, top_p"
            free = [
                replace(sampling, max_new_tokens=longest, ignore_eos=True, seed=i)
                for i in range(options.rows)
            ]
            bound = [replace(p, ignore_eos=False, constraint=constraint) for p in free]
            mixed = [b if i % 2 else f for i, (f, b) in enumerate(zip(free, bound, strict=True))]
            plain: float | None = None
            for name, params in (("free", free), ("constrained", bound), ("half of them", mixed)):
                times = full_steps(engine, timer, params, options.steps)
                line = (
                    f"{f'{kind}, {name}':<26} {options.rows} rows, vocabulary {vocab_size:,}: "
                    f"{times['step']:7.3f} ms a step ({times['device']:.3f} of it on the device)"
                )
                print(line + (f", {times['step'] / plain - 1:+.1%}" if plain else ""), flush=True)
                plain = plain or times["step"]
                told = {"name": f"{kind}, {name}", "vocab_size": vocab_size, "rows": options.rows}
                found.append(told | times)
        del engine, model
    return found
