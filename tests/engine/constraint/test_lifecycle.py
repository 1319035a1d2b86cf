"""Constrained rows leave nothing behind: no matchers, grammars, KV blocks or memory.

The rows of a tiny random model follow schemas in turn, in a KV cache so small that they preempt
each other. Some rows are aborted, and some have a constraint that does not compile.
"""

from __future__ import annotations

import gc
import random
from collections import Counter
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from measuring import anonymous_mib
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast
from transformers.convert_slow_tokenizer import bytes_to_unicode
from workloads import dummy_model

from batchgen.engine.caches.model_caches import paged_token_bytes
from batchgen.engine.constraint.constraint import Constraint
from batchgen.engine.constraint.matcher import Matcher
from batchgen.engine.interface.engine_config import EngineConfig
from batchgen.engine.llm_engine import LLMEngine
from batchgen.engine.sampling.sampling_params import RequestParams
from batchgen.engine.scheduling.admission import LengthPredictor
from batchgen.engine.strategy import Strategy
from batchgen.strategies.ar.strategy import ARStrategy
from batchgen.strategies.ar_spec.strategy import ARSpecStrategy

_ROWS, _SCHEMAS = 2000, 200
_BOUND_MIB = 16
"""The growth of memory that passes after the first pass over all schemas, in which the compiler's
cache fills: less than 10 KiB for each row."""
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


def build_engine(strategy: Strategy) -> LLMEngine:
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
    )
    return LLMEngine(model, tokenizer, (tokenizer.eos_token_id,), strategy, engine_config)


def requests(rows: int, schemas: int) -> Iterator[tuple[list[int], RequestParams]]:
    rng = random.Random(0)
    for i in range(rows):
        constraint = Constraint.make("json_schema", schema(i % schemas))
        if i % 50 == 49:
            constraint = Constraint("regex", f"(unclosed{i % schemas}")
        prompt = [rng.randrange(256) for _ in range(rng.randint(1, 20))]
        yield prompt, RequestParams(seed=i, max_new_tokens=64, constraint=constraint)


def run(engine: LLMEngine) -> tuple[list[float], Counter[str]]:
    """Run the rows to their ends.

    Returns the resident MiB after every pass over all schemas, and how many rows ended how.
    """
    rng = random.Random(1)
    coming = enumerate(requests(_ROWS, _SCHEMAS))
    alive: list[str] = []
    counts: Counter[str] = Counter()
    memory: list[float] = []
    added = passes = 0
    while added < _ROWS or engine.has_unfinished():
        while added < _ROWS and len(alive) < _WAITING:
            i, (prompt, params) = next(coming)
            engine.add_request(str(i), prompt, params)
            alive.append(str(i))
            added += 1
        if rng.random() < 0.1:
            counts["aborted"] += engine.abort(alive.pop(rng.randrange(len(alive))))
        for output in engine.step() if engine.has_unfinished() else []:
            alive.remove(output.request_id)
            counts[output.finish_reason] += 1
        if added // _SCHEMAS > passes or not engine.has_unfinished():
            passes = added // _SCHEMAS
            gc.collect()
            memory.append(anonymous_mib())
    return memory, counts


@pytest.mark.slow
@pytest.mark.parametrize("strategy", [ARStrategy(), ARSpecStrategy(adaptive=False)])
def test_rows_leave_nothing_behind(strategy: Strategy, monkeypatch: pytest.MonkeyPatch) -> None:
    engine = build_engine(strategy)
    # If the scheduler predicts that every row is about to end, it admits too many, and rows preempt
    # each other all the time.
    monkeypatch.setattr(
        LengthPredictor, "predict", lambda self, generated, limits, exact: generated
    )
    memory, counts = run(engine)
    assert sum(counts[reason] for reason in ("stop", "length", "error", "aborted")) == _ROWS
    assert counts["aborted"] and counts["error"] and engine.stats.preemptions
    assert not sum(type(thing) is Matcher for thing in gc.get_objects())
    assert not engine.scheduler.block_manager.usage
    assert max(memory[1:]) - memory[1] < _BOUND_MIB
