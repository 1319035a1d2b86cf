"""Rows of hybrid models have the same bits however they are scheduled.

What a row says alone, in a cache that it never has to leave, with its prompt read in one forward,
is held against every other way to run it.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from batchgen.engine.interface import engine_config
from batchgen.engine.interface.engine_config import EngineConfig
from batchgen.engine.interface.outputs import RequestOutput
from batchgen.engine.llm_engine import LLMEngine
from batchgen.engine.loading.loader import load_model
from batchgen.engine.models.causal_lm import CausalLM
from batchgen.engine.sampling.sampling_params import RequestParams
from batchgen.engine.strategy import Strategy
from batchgen.kernels.linear_attention.causal_conv import causal_conv_step
from batchgen.kernels.linear_attention.delta_inputs import DeltaInputs, DeltaRecords
from batchgen.kernels.linear_attention.delta_rule import delta_step
from batchgen.kernels.linear_attention.state_rows import StepRows
from batchgen.strategies.ar.strategy import ARStrategy
from batchgen.strategies.ar_spec.strategy import ARSpecStrategy
from tests.support.cases import some_slow
from tests.support.engine.alone_rows import Alone
from tests.support.engine.engine_rows import Request, expect_short_rows
from tests.support.engine.forced_drafts import ForcedStrategy

CPU = torch.device("cpu")
ROUTE = "routed_experts"
TinyModel = Callable[..., Path]


def hybrid(tiny_model: TinyModel, **changes: Any) -> Path:
    return tiny_model(
        "qwen3_5_moe_text",
        num_hidden_layers=2,
        layer_types=["linear_attention", "full_attention"],
        num_experts=3,
        num_experts_per_tok=2,
        **changes,
    )


@pytest.fixture(scope="module")
def folder(tiny_model: TinyModel) -> Path:
    return hybrid(tiny_model)


def load(folder: Path) -> CausalLM:
    return load_model(folder, device=CPU)


def requests(seed: int, count: int = 8, lengths: Sequence[int] = (1, 6, 30)) -> list[Request]:
    """Prompts of which some begin alike, within a chunk of 64 tokens or after one; with samples."""
    rng = random.Random(seed)
    common = [rng.randrange(3, 128) for _ in range(140)]
    rows: list[Request] = []
    while len(rows) < count:
        own = [rng.randrange(3, 128) for _ in range(rng.choice([1, 5, 40, 70]))]
        prompt = [*common[: rng.choice([0, 20, 64, 90, 128, 140])], *own]
        for _ in range(rng.randint(1, 3)):
            params = RequestParams(
                temperature=rng.choice([0, 0.7, 1.0]),
                max_new_tokens=rng.choice(lengths),
                seed=rng.randrange(4),
                logprobs=True,
                columns=(ROUTE,),
            )
            rows.append((prompt, params))
    return rows[:count]


def make_engine(model: CausalLM, strategy: Strategy | None = None, **config: Any) -> LLMEngine:
    options: dict[str, Any] = {"max_model_len": 256, "kv_cache_gib": 0.01, "max_num_seqs": 6}
    return LLMEngine(
        model,
        None,
        (),
        strategy or ARStrategy(),
        EngineConfig(**options | config),
        context_columns=[ROUTE],
    )


def run(engine: LLMEngine, rows: Sequence[Request]) -> list[RequestOutput]:
    for i, (prompt, params) in enumerate(rows):
        engine.add_request(str(i), prompt, params)
    found: dict[int, RequestOutput] = {}
    while engine.has_unfinished():
        found |= {int(output.request_id): output for output in engine.step()}
        engine.scheduler.block_manager.check_integrity(engine.scheduler.running.rows)
    manager = engine.scheduler.block_manager
    assert manager.usage == 0 and manager.states is not None
    assert manager.states.num_free == engine.config.max_num_seqs
    return [found[i] for i in range(len(rows))]


@pytest.fixture(scope="module")
def alone(folder: Path) -> Alone:
    return Alone(make_engine(load(folder), max_num_seqs=1, prefix_caching=False), run)


@pytest.mark.quick(1)
@pytest.mark.parametrize(
    ("batched", "overlap", "block_size"),
    some_slow(
        [(64, False, 16), (64, True, 8), (128, False, 64), (2048, True, 16), (2048, False, 4)],
        quick=((64, True, 8), (2048, False, 4)),
    ),
)
def test_any_schedule(
    alone: Alone, folder: Path, batched: int, overlap: bool, block_size: int
) -> None:
    rows = requests(seed=1)
    engine = make_engine(
        load(folder), overlap=overlap, max_batched_tokens=batched, block_size=block_size
    )
    alone.check(rows, run(engine, rows))
    assert engine.stats.cached_tokens > 0


@pytest.mark.thorough
def test_rows_that_lose_their_caches(
    alone: Alone, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What they had generated is read again as it was read first, token by token."""
    expect_short_rows(monkeypatch)
    params = RequestParams(max_new_tokens=30, seed=3, logprobs=True, columns=(ROUTE,))
    rows = [([3 + (i + 2) * j % 125 for j in range(43 + 20 * i)], params) for i in range(4)]
    engine = make_engine(
        load(folder), max_model_len=144, max_batched_tokens=64, kv_cache_gib=cache_gib(folder, 144)
    )
    alone.check(rows, run(engine, rows))
    assert engine.stats.preemptions > 0


@pytest.mark.thorough
def test_drafts_that_fall_anywhere_are_taken_back(alone: Alone, folder: Path) -> None:
    """Also by rows that lose their caches."""
    check_forced(alone, folder, k=3)


@pytest.mark.thorough
@pytest.mark.parametrize("fold", [2, pytest.param(8, marks=pytest.mark.slow)])
def test_states_that_are_written_back_later(
    alone: Alone, folder: Path, monkeypatch: pytest.MonkeyPatch, fold: int
) -> None:
    """As on a GPU, where records stay pending."""
    monkeypatch.setattr(engine_config, "folded_at_once", lambda device: fold)
    check_forced(alone, folder, k=3)


@pytest.mark.slow
@pytest.mark.parametrize("k", [1, 2, 4, 5])
def test_any_number_of_drafts(alone: Alone, folder: Path, k: int) -> None:
    check_forced(alone, folder, k)


def check_forced(alone: Alone, folder: Path, k: int) -> None:
    rows = requests(seed=20 + k, lengths=(9, 20))
    answers = {str(i): alone(row).token_ids for i, row in enumerate(rows)}
    strategy = ForcedStrategy(answers, k, seed=k)
    engine = make_engine(
        load(folder), strategy, max_num_seqs=4, kv_cache_gib=cache_gib(folder, 300)
    )
    strategy._engine = engine
    alone.check(rows, run(engine, rows))
    assert all(strategy.held), "the case is about every number of drafts that can hold"


def test_states_after_drafts_are_those_of_plain_steps(alone: Alone, folder: Path) -> None:
    (prompt, params) = requests(seed=50, lengths=(17,))[2]
    strategy = ForcedStrategy({"0": alone((prompt, params)).token_ids}, 3, seed=1)
    found = []
    for chosen in (None, strategy):
        engine = strategy._engine = make_engine(load(folder), chosen, max_num_seqs=1)
        run(engine, [(prompt, params)])
        found.append(folded_states(engine))
    assert sum(strategy.held[1:]) > 2, "some drafts held"
    for plain, drafted in zip(*found, strict=True):
        assert plain.any() and torch.equal(plain, drafted)


def folded_states(engine: LLMEngine) -> list[Tensor]:
    """The windows and matrices of the last row, after the records of its last step."""
    states, found = engine._runner.states, []
    assert states is not None
    for cache in states.layers:
        window, matrix = cache.state["window"], cache.state["matrix"]
        slot = torch.ones(1, dtype=torch.int64)
        step = StepRows(slot, cache.pending, cache.first, 0, fold=1)
        nothing = torch.zeros(0, window.shape[-1])
        weight, none = torch.zeros(window.shape[-1], 4), torch.zeros(0, 4)
        causal_conv_step(nothing, weight, None, window, cache.records["inputs"], step)
        inputs = DeltaInputs(nothing, none, none, none.new_zeros(4), none.new_zeros(4))
        records = DeltaRecords(*(cache.records[name] for name in DeltaRecords._fields))
        delta_step(inputs, matrix, records, step)
        found += [window[1].clone(), matrix[1].clone()]
    return found


@pytest.mark.thorough
def test_ngram_drafts(alone: Alone, folder: Path) -> None:
    rows = requests(seed=40, count=4, lengths=(20,))
    strategy = ARSpecStrategy(num_spec_tokens=3, adaptive=False, ngram_min=1)
    engine = make_engine(load(folder), strategy, overlap=True, max_batched_tokens=64)
    alone.check(rows, run(engine, rows))
    assert engine.stats.counts["num_draft_tokens"] > 0


@pytest.mark.parametrize("length", [205, pytest.param(4000, marks=pytest.mark.slow)])
def test_samples_of_one_prompt_compute_it_once(tiny_model: TinyModel, length: int) -> None:
    model = load(hybrid(tiny_model, max_position_embeddings=4096))
    prompt = [3 + i * i % 120 for i in range(length)]
    rows = [
        (prompt, RequestParams(max_new_tokens=3, seed=seed, logprobs=True, columns=(ROUTE,)))
        for seed in range(64)
    ]
    room: dict[str, Any] = {"max_model_len": length + 3, "kv_cache_gib": 0.1}
    engine = make_engine(model, max_num_seqs=64, **room)
    found = run(engine, rows)
    single = make_engine(model, max_num_seqs=1, prefix_caching=False, **room)
    Alone(single, run).check(rows[:2], found[:2])
    shared = length // 64 * 64
    assert engine.stats.cached_tokens == 63 * shared
    assert engine.stats.prefill_tokens == length + 63 * (length - shared)


@pytest.mark.thorough
def test_generated_tokens_in_a_prompt_are_read_as_a_prompt(alone: Alone, folder: Path) -> None:
    """The first row has read them one by one, and what it kept of them is not shared."""
    params = RequestParams(temperature=0, max_new_tokens=60, logprobs=True, columns=(ROUTE,))
    engine = make_engine(load(folder), max_num_seqs=1)
    prompt = [3 + i * i % 120 for i in range(80)]
    (first,) = run(engine, [(prompt, params)])
    longer = [*prompt, *first.token_ids]
    params = replace(params, max_new_tokens=4)
    rows = [(longer, params), ([*longer, 5], params), ([*longer, 6], params)]
    for row in rows:
        alone.check([row], run(engine, [row]))
    assert engine.stats.cached_tokens == 64 + 2 * 128


@pytest.mark.thorough
def test_a_row_that_is_read_again_does_not_start_from_a_prompt_of_its_own_words(
    alone: Alone, folder: Path
) -> None:
    """Another row has read the first one's answer as part of its prompt, and left a checkpoint."""
    params = RequestParams(temperature=0, max_new_tokens=71, logprobs=True, columns=(ROUTE,))
    first = ([3 + i * i % 120 for i in range(60)], params)
    answer = alone(first).token_ids
    other = ([*first[0], *answer[:70]], replace(params, max_new_tokens=8))
    engine = make_engine(load(folder))
    engine.add_request("first", *first)
    while engine.stats.generated_tokens < 70:
        assert not engine.step()
    (row,) = engine.scheduler.running.rows
    engine.add_request("other", *other)
    engine.step()
    engine.scheduler._preempt(row)
    found: dict[str, RequestOutput] = {}
    while engine.has_unfinished():
        found |= {output.request_id: output for output in engine.step()}
    alone.check([first, other], [found["first"], found["other"]])


@pytest.mark.gpu
@pytest.mark.parametrize("k", [0, 3])
@pytest.mark.parametrize("graph", [False, True])
def test_on_a_gpu(graph: bool, k: int, alone: Alone, folder: Path) -> None:
    """Captured and mixed steps in a loop that never waits, with rows that lose their caches."""
    rows = requests(seed=60, count=30, lengths=(9, 40))
    strategy = ARSpecStrategy(num_spec_tokens=k, adaptive=False, ngram_min=1) if k else None
    engine = make_engine(
        load_model(folder, device=torch.device("cuda")),
        strategy,
        cuda_graph=graph,
        overlap=True,
        max_num_seqs=12,
        chunk_tokens=64,
        max_batched_tokens=256,
        kv_cache_gib=cache_gib(folder, 800),
    )
    same = 0
    for row, output in zip(rows, run(engine, rows), strict=True):
        expected = alone(row)
        same += output.token_ids == expected.token_ids
        if output.token_ids == expected.token_ids:
            found = output.columns["logprobs"]
            np.testing.assert_allclose(found, expected.columns["logprobs"], atol=2e-3)
    # Two tokens that all but tie may change places, and then the row goes on otherwise.
    assert same >= 28
    assert engine.stats.cached_tokens > 0


def cache_gib(folder: Path, tokens: int) -> float:
    from batchgen.engine.caches.model_caches import paged_token_bytes

    model = load(folder)
    columns = model.declared_columns(model.config)
    return (tokens + 16) * paged_token_bytes(model.cache_specs, columns, torch.float32) / 2**30
