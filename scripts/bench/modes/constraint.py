"""The mode constraint of bench_engine.py: decode steps with and without a constraint."""

from __future__ import annotations

import argparse
import random
import statistics
import sys
import time
from collections.abc import Iterable
from dataclasses import replace
from pathlib import Path
from typing import Any

from measuring import DEVICE, commas
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import AutoTokenizer, PreTrainedTokenizerBase, PreTrainedTokenizerFast
from workloads import MODELS, dummy_model

from batchgen.engine.base.engine_config import EngineConfig
from batchgen.engine.base.step_timing import StepTimer
from batchgen.engine.constraint.compiler import GrammarCompiler
from batchgen.engine.constraint.constraint import Constraint
from batchgen.engine.llm_engine import LLMEngine
from batchgen.engine.sampling.sampling_params import SamplingParams
from batchgen.strategies.ar.strategy import ARStrategy

sys.path.append(str(Path(__file__).parents[2] / "check"))


PROMPT_TOKENS = 128


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
