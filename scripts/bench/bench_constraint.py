"""Time decode steps with and without a constraint on one device.

    python scripts/bench/bench_constraint.py --tokenizer FOLDER [--model qwen3-8b] [--rows 256] \\
        [--vocab-sizes 49152,151936]

A model of random weights writes JSON of a schema with free strings, whose grammar states are the
costliest ones to compute masks for. The tokenizer is a real one; if a larger vocabulary is asked
for, randomly joined pairs of its tokens are added.
"""

from __future__ import annotations

import argparse
import json
import random
import statistics
import time
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import AutoTokenizer, PreTrainedTokenizerBase, PreTrainedTokenizerFast
from workloads import MODELS, dummy_model

from batchgen.engine.base.engine_config import EngineConfig
from batchgen.engine.base.step_timing import StepTime, StepTimer
from batchgen.engine.constraint.compiler import GrammarCompiler
from batchgen.engine.constraint.constraint import Constraint
from batchgen.engine.llm_engine import LLMEngine
from batchgen.engine.sampling.sampling_params import SamplingParams
from batchgen.strategies.ar.strategy import ARStrategy

PROMPT_TOKENS = 128
WARM_STEPS = 16
SCHEMA: dict[str, Any] = {
    "type": "object",
    "properties": {
        "people": {
            "type": "array",
            "minItems": 100,  # so that no row ends
            "items": {
                "type": "object",
                "properties": {
                    "name": {"type": "string"},
                    "age": {"type": "integer", "minimum": 0, "maximum": 120},
                    "role": {"enum": ["author", "reader", "editor"]},
                    "notes": {"type": "array", "items": {"type": "string"}},
                },
                "required": ["name", "age", "role", "notes"],
                "additionalProperties": False,
            },
        }
    },
    "required": ["people"],
    "additionalProperties": False,
}


@dataclass(frozen=True, slots=True)
class Timing:
    """The decode steps that had all rows: how many, and medians of their times in milliseconds.

    Attributes:
        device: device time of a step, from its first launch to the end of its last.
        waiting: time before a step in which the device waited for the host.
        step: the sum of both.
    """

    name: str
    vocab_size: int
    rows: int
    steps: int
    device: float
    waiting: float
    step: float

    @classmethod
    def of(cls, name: str, vocab_size: int, rows: int, steps: list[StepTime]) -> Timing:
        def median(values: list[float]) -> float:
            return statistics.median(values) * 1e3

        return cls(
            name,
            vocab_size,
            rows,
            len(steps),
            median([step.seconds for step in steps]),
            median([step.idle_before for step in steps]),
            median([step.seconds + step.idle_before for step in steps]),
        )

    def line(self, plain: Timing | None) -> str:
        text = (
            f"{self.name:<26} {self.rows} rows, vocabulary {self.vocab_size:,}: "
            f"{self.step:7.3f} ms a step ({self.device:.3f} of it on the device)"
        )
        return text + (f", {self.step / plain.step - 1:+.1%}" if plain else "")


def widened(tokenizer: PreTrainedTokenizerBase, size: int) -> PreTrainedTokenizerFast:
    """Make a byte-level tokenizer for a model with `size` logits.

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


def measure(
    engine: LLMEngine, timer: StepTimer, name: str, params: list[SamplingParams], steps: int
) -> Timing:
    """Run all rows together for `steps` decode steps, after some steps that are not timed.

    Raises:
        RuntimeError: if fewer than half of the steps had all rows, because rows ended.
    """
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
    return Timing.of(name, engine.vocab_size, rows, times[1:])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--tokenizer", required=True, help="folder")
    parser.add_argument("--model", default="qwen3-8b", help=", ".join(MODELS))
    parser.add_argument("--rows", type=int, default=256)
    parser.add_argument("--steps", type=int, default=100)
    parser.add_argument("--vocab-sizes", default="49152,151936")
    parser.add_argument("--kv-cache-gib", type=float, default=24.0)
    parser.add_argument("--json", type=Path)
    args = parser.parse_args()
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    base = AutoTokenizer.from_pretrained(args.tokenizer)
    timings: list[Timing] = []
    for vocab_size in map(int, args.vocab_sizes.split(",")):
        tokenizer = base if vocab_size < 2 * len(base) else widened(base, vocab_size)
        assert tokenizer.eos_token_id is not None
        eos = (int(tokenizer.eos_token_id),)
        model = dummy_model(args.model, device, vocab_size=vocab_size)
        compiler = GrammarCompiler(tokenizer, vocab_size, eos)
        constraint = Constraint.make("json_schema", SCHEMA)
        start = time.perf_counter()
        compiler.compile(constraint)
        print(f"compiled in {time.perf_counter() - start:.3f} s")
        config = EngineConfig(
            max_num_seqs=args.rows, max_model_len=2048, kv_cache_gib=args.kv_cache_gib
        )
        # Rows also decode while others are still prefilled.
        longest = args.steps + WARM_STEPS + args.rows // 2
        timer = StepTimer(device)
        engine = LLMEngine(model, tokenizer, eos, ARStrategy(), config, timer, compiler=compiler)
        for sampling in (SamplingParams(temperature=0), SamplingParams(temperature=1, top_p=0.95)):
            kind = "greedy" if sampling.greedy else "sampled, top_p"
            free = [
                replace(sampling, max_new_tokens=longest, ignore_eos=True, seed=i)
                for i in range(args.rows)
            ]
            bound = [replace(p, ignore_eos=False, constraint=constraint) for p in free]
            mixed = [b if i % 2 else f for i, (f, b) in enumerate(zip(free, bound, strict=True))]
            plain: Timing | None = None
            for name, params in (("free", free), ("constrained", bound), ("half of them", mixed)):
                timing = measure(engine, timer, f"{kind}, {name}", params, args.steps)
                print(timing.line(plain), flush=True)
                plain = plain or timing
                timings.append(timing)
        del engine, model
    if args.json:
        figures = [asdict(timing) for timing in timings]
        args.json.write_text(json.dumps(figures, indent=1) + "\n")


if __name__ == "__main__":
    main()
