"""Speculative decoding on a GPU: the tokens of plain decoding, and no wait for the device."""

from __future__ import annotations

import itertools
import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from batchgen.engine.interface.engine_config import EngineConfig
from batchgen.engine.interface.outputs import RequestOutput
from batchgen.engine.llm_engine import LLMEngine
from batchgen.engine.loading.loader import load_model
from batchgen.engine.models.causal_lm import CausalLM
from batchgen.engine.sampling.sampling_params import RequestParams
from batchgen.engine.strategy import Strategy
from batchgen.strategies.ar.strategy import ARStrategy
from batchgen.strategies.ar_spec.strategy import ARSpecStrategy
from tests.support.engine.engine_rows import beside
from tests.support.engine.toy_mtp import with_head

pytestmark = pytest.mark.gpu

DRAFTS: dict[str, dict[str, Any]] = {
    "ngram": {"ngram_min": 1},
    "pool": {"ngram_min": 1, "ngram_pool": True},
    "self": {"proposer": "draft"},
    "other": {"proposer": "draft"},
    "head": {"proposer": "mtp"},
}


def load(path: Path) -> CausalLM:
    return load_model(path, device=torch.device("cuda"), dtype=torch.float32)


def load_target(tiny_model: Callable[..., Path], kind: str) -> CausalLM:
    if kind == "head":
        return with_head(tiny_model("llama"), device="cuda")
    return load(tiny_model("qwen3"))


def requests(count: int, vocab: int) -> list[tuple[list[int], RequestParams]]:
    rng = random.Random(5)
    kinds: list[dict[str, Any]] = [
        {"temperature": 0},
        {"temperature": 0, "repetition_penalty": 1.2},
        {"temperature": 0.7, "top_k": 20},
        {"temperature": 1.0, "top_p": 0.8, "presence_penalty": 0.4, "frequency_penalty": 0.2},
        {"temperature": 1.3, "min_p": 0.05, "min_new_tokens": 10, "stop_token_ids": (3, 4)},
    ]
    made = []
    for i in range(count):
        pattern = [rng.randrange(5, vocab) for _ in range(rng.randint(2, 6))]
        prompt = (pattern * 12)[: rng.randint(3, 40)]
        params = RequestParams(
            max_new_tokens=rng.choice([1, 2, 10, 60]) if i % 5 < 4 else 40,
            seed=i,
            logprobs=True,
            **kinds[i % len(kinds)],
        )
        made.append((prompt, params))
    return made


def generate(engine: LLMEngine, count: int) -> dict[str, RequestOutput]:
    for i, (prompt, params) in enumerate(requests(count, engine.vocab_size)):
        engine.add_request(str(i), prompt, params)
    outputs: dict[str, RequestOutput] = {}
    while engine.has_unfinished():
        outputs |= {output.request_id: output for output in engine.step()}
    return outputs


@pytest.mark.parametrize("kind", list(DRAFTS))
def test_tokens_are_those_of_plain_decoding(tiny_model: Callable[..., Path], kind: str) -> None:
    target, other = tiny_model("qwen3"), tiny_model("llama")
    plain = LLMEngine(load_target(tiny_model, kind), None, (), ARStrategy(), config())
    wanted, accepted = generate(plain, 40), 0
    for graph, overlap, adaptive in itertools.product([False, True], repeat=3):
        draft = {"self": target, "other": other}.get(kind)
        strategy = ARSpecStrategy(num_spec_tokens=4, adaptive=adaptive, **DRAFTS[kind])
        engine = LLMEngine(
            load_target(tiny_model, kind),
            None,
            (),
            strategy,
            config(cuda_graph=graph, overlap=overlap, max_num_seqs=20),
            others=beside(None if draft is None else load(draft)),
        )
        outputs = generate(engine, 40)
        accepted += engine.stats.counts["num_accepted_tokens"]
        for name, output in outputs.items():
            assert output.token_ids == wanted[name].token_ids, (name, graph, overlap, adaptive)
            assert output.finish_reason == wanted[name].finish_reason
            np.testing.assert_allclose(
                output.columns["logprobs"], wanted[name].columns["logprobs"], atol=1e-4
            )
    assert accepted > 100


@pytest.mark.parametrize("kind", ["ngram", "pool", "self", "head"])
def test_the_host_waits_for_no_step_but_the_one_it_reads(
    tiny_model: Callable[..., Path], kind: str
) -> None:
    target = tiny_model("qwen3")
    strategy: Strategy = ARSpecStrategy(num_spec_tokens=3, adaptive=False, **DRAFTS[kind])
    draft = load(target) if kind == "self" else None
    model = load_target(tiny_model, kind)
    engine = LLMEngine(model, None, (), strategy, config(), others=beside(draft))
    generate(engine, 20)  # compiles and captures all that comes again
    torch.cuda.set_sync_debug_mode("error")
    try:
        outputs = generate(engine, 20)
    finally:
        torch.cuda.set_sync_debug_mode("default")
    assert len(outputs) == 20 and engine.stats.counts["num_draft_tokens"] > 0


def config(**options: Any) -> EngineConfig:
    return EngineConfig(max_model_len=256, kv_cache_gib=0.05, **options)


def test_an_engine_gets_the_memory_of_one_that_is_gone(tiny_model: Callable[..., Path]) -> None:
    """What the strategy keeps must not lie in a corner of the cache that was there before."""
    model = load(tiny_model("llama"))
    LLMEngine(model, None, (), ARStrategy(), EngineConfig(kv_cache_gib=2.0))
    small = EngineConfig(kv_cache_gib=0.01)
    engine = LLMEngine(model, None, (), ARSpecStrategy(num_spec_tokens=2), small)
    assert torch.cuda.memory_reserved() < 2 * 2**30 and engine.memory.kv_tokens
