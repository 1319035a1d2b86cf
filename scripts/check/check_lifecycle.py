"""Check that constrained rows leave nothing behind: no matchers, grammars, KV blocks or memory.

    python scripts/check/check_lifecycle.py [--rows 10000] [--schemas 500] [--strategy ar]

The rows of a tiny random model follow schemas in turn, in a KV cache so small that they preempt
each other. Some rows are aborted, and some have a constraint that does not compile. What is alive
is printed meanwhile. The exit code is 1 if a matcher or a KV block is left, if a row is lost, or if
resident memory grew by more than --bound MiB after the first pass over all schemas, in which the
compiler's cache fills.
"""

from __future__ import annotations

import argparse
import gc
import random
import sys
import time
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from unittest import mock

import torch
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast
from transformers.convert_slow_tokenizer import bytes_to_unicode

from batchgen.engine.base.engine_config import EngineConfig
from batchgen.engine.caches.model_caches import paged_token_bytes
from batchgen.engine.constraint.constraint import Constraint
from batchgen.engine.constraint.matcher import Matcher
from batchgen.engine.llm_engine import LLMEngine
from batchgen.engine.sampling.sampling_params import SamplingParams
from batchgen.engine.scheduling.admission import LengthPredictor
from batchgen.engine.strategy import Strategy
from batchgen.strategies.ar.strategy import ARStrategy
from batchgen.strategies.ar_spec.strategy import ARSpecStrategy

sys.path.append(str(Path(__file__).parents[1] / "bench"))
from this_process import resident_mib
from workloads import dummy_model

_BOUND_MIB = 32
"""The growth of memory that passes after the first pass: less than 4 KiB for each of 9,000 rows."""
_MAX_SEQS = 64
_CACHE_TOKENS = 640
_BLOCK = 4
"""Tokens per KV block."""
_WAITING = 128
"""The most rows that were added and have not ended."""


def byte_tokenizer() -> PreTrainedTokenizerFast:
    """Make a tokenizer with one token for each byte, and EOS."""
    raw = Tokenizer(models.BPE({c: i for i, c in enumerate(bytes_to_unicode().values())}, []))
    raw.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    raw.decoder = decoders.ByteLevel()
    raw.add_special_tokens([AddedToken("<|end|>", special=True)])
    return PreTrainedTokenizerFast(tokenizer_object=raw, eos_token="<|end|>")


def schema(index: int) -> dict[str, Any]:
    """Make a JSON Schema that differs from those of other indices and allows short rows only."""
    rng = random.Random(index)
    kinds: list[dict[str, Any]] = [
        {"type": "integer", "minimum": index % 7, "maximum": index},
        {"enum": [f"e{index}", index, None]},
        {"type": "string", "maxLength": 1 + index % 5},
        {"type": "array", "items": {"type": "boolean"}, "maxItems": 1 + index % 3},
        {"type": ["boolean", "null"]},
    ]
    names = [f"p{index}", *rng.sample("abcdefgh", rng.randint(0, 2))]
    return {
        "type": "object",
        "properties": {name: rng.choice(kinds) for name in names},
        "required": names,
        "additionalProperties": False,
    }


def build_engine(strategy: Strategy, overlap: bool) -> LLMEngine:
    tokenizer = byte_tokenizer()
    model = dummy_model("tiny", torch.device("cpu"), vocab_size=300, num_hidden_layers=1)
    blocks = _CACHE_TOKENS // _BLOCK + 1.5
    per_block = _BLOCK * paged_token_bytes(model.cache_specs, (), model.dtype)
    engine_config = EngineConfig(
        max_num_seqs=_MAX_SEQS,
        max_batched_tokens=512,
        max_model_len=128,
        block_size=_BLOCK,
        kv_cache_gib=blocks * per_block / 2**30,
        overlap=overlap,
    )
    return LLMEngine(model, tokenizer, (tokenizer.eos_token_id,), strategy, engine_config)


def requests(rows: int, schemas: int) -> Iterator[tuple[list[int], SamplingParams]]:
    rng = random.Random(0)
    for i in range(rows):
        constraint = Constraint.make("json_schema", schema(i % schemas))
        if i % 50 == 49:
            constraint = Constraint("regex", f"(unclosed{i % schemas}")
        prompt = [rng.randrange(256) for _ in range(rng.randint(1, 20))]
        yield prompt, SamplingParams(seed=i, max_new_tokens=64, constraint=constraint)


def live_matchers() -> int:
    return sum(type(thing) is Matcher for thing in gc.get_objects())


def run(engine: LLMEngine, rows: int, schemas: int) -> tuple[list[float], Counter[str]]:
    """Run the rows to their ends.

    Returns the resident MiB after every pass over all schemas, and how many rows ended how.
    """
    rng = random.Random(1)
    coming = enumerate(requests(rows, schemas))
    alive: list[str] = []
    counts: Counter[str] = Counter()
    memory: list[float] = []
    start = time.perf_counter()
    added = passes = 0
    while added < rows or engine.has_unfinished():
        while added < rows and len(alive) < _WAITING:
            i, (prompt, params) = next(coming)
            engine.add_request(str(i), prompt, params)
            alive.append(str(i))
            added += 1
        if rng.random() < 0.1:
            counts["aborted"] += engine.abort(alive.pop(rng.randrange(len(alive))))
        for output in engine.step() if engine.has_unfinished() else []:
            alive.remove(output.request_id)
            counts[output.finish_reason] += 1
            counts["satisfied"] += bool(output.constraint_satisfied)
        if added // schemas > passes or not engine.has_unfinished():
            passes = added // schemas
            gc.collect()
            memory.append(resident_mib())
            print(
                f"{time.perf_counter() - start:5.0f} s  {added:6} rows added  "
                f"{memory[-1]:7.1f} MiB  {live_matchers():3} matchers  "
                f"{counts['satisfied']:6} satisfied  {counts['aborted']:4} aborted  "
                f"{engine.stats.preemptions:6} preemptions",
                flush=True,
            )
    return memory, counts


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rows", type=int, default=10_000)
    parser.add_argument("--schemas", type=int, default=500)
    parser.add_argument("--strategy", choices=("ar", "ar_spec"), default="ar")
    parser.add_argument("--no-overlap", action="store_true")
    parser.add_argument("--bound", type=float, default=_BOUND_MIB, help="MiB")
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    strategy = ARStrategy() if arguments.strategy == "ar" else ARSpecStrategy(adaptive=False)
    engine = build_engine(strategy, not arguments.no_overlap)
    # If the scheduler predicts that every row is about to end, it admits too many, and rows preempt
    # each other all the time.
    with mock.patch.object(
        LengthPredictor, "predict", lambda self, generated, limits, exact: generated
    ):
        memory, counts = run(engine, arguments.rows, arguments.schemas)
    ended = sum(counts[reason] for reason in ("stop", "length", "error", "aborted"))
    grown = max(memory[1:], default=memory[0]) - memory[min(1, len(memory) - 1)]
    usage = engine.scheduler.block_manager.usage
    print(
        f"{arguments.rows} rows: {dict(counts)}; {engine.stats.preemptions} preemptions; "
        f"{live_matchers()} matchers and {usage:.0%} of the blocks are left; memory grew by "
        f"{grown:.1f} MiB after the warm-up (at most {arguments.bound:g})"
    )
    fine = ended == arguments.rows and not live_matchers() and not usage
    return 0 if fine and grown <= arguments.bound else 1


if __name__ == "__main__":
    sys.exit(main())
