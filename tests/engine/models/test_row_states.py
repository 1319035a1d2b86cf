"""Models with a state per row: whatever the schedule, a row gets the tokens, log-probabilities and
routes that it gets alone, token by token.
"""

from __future__ import annotations

import itertools
import random
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from batchgen.engine.caches.model_caches import CacheSizes
from batchgen.engine.execution.model_inputs import ModelInputs
from batchgen.engine.execution.model_runner import ModelRunner, PrefillInputs
from batchgen.engine.interface.engine_config import EngineConfig
from batchgen.engine.interface.outputs import RequestOutput
from batchgen.engine.llm_engine import LLMEngine
from batchgen.engine.memory.model_use import ModelUse
from batchgen.engine.sampling.sampler import sample_tokens
from batchgen.engine.sampling.sampling_inputs import SamplingInputs
from batchgen.engine.sampling.sampling_params import RequestParams
from batchgen.engine.strategy import Strategy
from batchgen.strategies.ar.strategy import ARStrategy
from batchgen.strategies.ar_spec.strategy import ARSpecStrategy
from batchgen.strategies.dllm.strategy import DLLMStrategy
from tests.support.cases import some_slow
from tests.support.engine.engine_rows import Request, expect_short_rows
from tests.support.engine.forced_drafts import ForcedStrategy
from tests.support.engine.toy_hybrid import ToyHybridForCausalLM, make_toy, naive_logits

CPU = torch.device("cpu")
ROUTE = "toy_route"


class PlainLoop:
    """A model that reads one row, one token at a time, and draws the next."""

    def __init__(self, model: ToyHybridForCausalLM, block_size: int = 16) -> None:
        model.pack()
        columns = model.declared_columns(model.config)
        use = ModelUse(model, (1,), columns=columns)
        self._runner = ModelRunner(model, use.caches(CacheSizes(20, block_size, 1)))
        self._tables = torch.arange(1, 20, device=model.device).unsqueeze(0)
        self._seen: dict[tuple[tuple[int, ...], RequestParams], tuple[Any, Any, Any]] = {}

    def logits(self, token: int, position: int) -> Tensor:
        """[1, vocab] after one more token of the row."""
        device = self._runner.device
        inputs = ModelInputs(
            torch.tensor([token], device=device),
            torch.tensor([position], device=device),
            self._tables,
            np.ones(1, np.int64),
            np.array([position + 1]),
            torch.ones(1, dtype=torch.int64, device=device),
        )
        return self._runner.prefill(PrefillInputs(inputs, np.zeros(1, np.int64))).logits

    def generate(
        self, prompt: Sequence[int], params: RequestParams
    ) -> tuple[list[int], np.ndarray[Any, Any], np.ndarray[Any, Any]]:
        """Token ids, their log-probabilities and the routes of all tokens but the last."""
        key = (tuple(prompt), params)
        if key not in self._seen:
            self._seen[key] = self._generate(list(prompt), params)
        return self._seen[key]

    def _generate(self, ids: list[int], params: RequestParams) -> tuple[Any, Any, Any]:
        start, logprobs = len(ids), []
        longest = start + params.max_new_tokens
        for position in range(longest - 1):
            logits = self.logits(ids[position], position)
            if position + 1 < start:
                continue
            sampling = SamplingInputs.build(
                [replace(params, logprobs=True)], [start], [ids], [()], [longest], logits.device
            )
            at = torch.tensor([position + 1], device=logits.device)
            step = sample_tokens(logits, sampling, at)
            ids.append(int(step.token_ids))
            logprobs.append(float(step.columns["logprobs"]))
        plane = self._runner.caches.columns[ROUTE].flatten(0, 1)
        size = self._runner.caches.block_size
        places = torch.arange(size, size + len(ids) - 1, device=plane.device)
        routes = plane[places].cpu().numpy()
        return ids[start:], np.array(logprobs, np.float32), routes


@pytest.fixture(scope="module")
def loop() -> PlainLoop:
    return PlainLoop(make_toy())


def requests(
    count: int, seed: int, *, lengths: Sequence[int] = (1, 2, 9, 20), shared: int = 3
) -> list[Request]:
    """Rows of which `shared` have one prompt each time, sampled in different ways.

    Args:
        lengths: tokens to generate, drawn for each row.
    """
    rng = random.Random(seed)
    rows: list[Request] = []
    prefix = [rng.randrange(3, 128) for _ in range(24)]
    while len(rows) < count:
        own = [rng.randrange(3, 128) for _ in range(rng.choice([1, 2, 7, 16, 33]))]
        prompt = [*prefix[: rng.choice([0, 9, 16, 24])], *own]
        for _ in range(rng.randint(1, shared)):
            params = RequestParams(
                temperature=rng.choice([0, 0.7, 1.0]),
                max_new_tokens=rng.choice(lengths),
                repetition_penalty=rng.choice([1.0, 1.3]),
                seed=rng.randrange(4),
            )
            rows.append((prompt, params))
    return rows[:count]


def make_engine(
    model: ToyHybridForCausalLM, strategy: Strategy | None = None, **config: Any
) -> LLMEngine:
    options: dict[str, Any] = {"max_model_len": 128, "kv_cache_gib": 0.01, "max_num_seqs": 6}
    options |= config
    return LLMEngine(
        model,
        None,
        (),
        strategy or ARStrategy(),
        EngineConfig(**options),
        context_columns=[ROUTE],
    )


def run(
    engine: LLMEngine, rows: Sequence[Request], aborts: dict[int, list[int]] | None = None
) -> dict[int, RequestOutput]:
    """Outputs by number, without the rows that are aborted at some step."""
    for i, (prompt, params) in enumerate(rows):
        asked = replace(params, logprobs=True, columns=(ROUTE,))
        engine.add_request(str(i), prompt, asked)
    found: dict[int, RequestOutput] = {}
    step = 0
    while engine.has_unfinished():
        for i in (aborts or {}).get(step, []):
            engine.abort(str(i))
        found |= {int(output.request_id): output for output in engine.step()}
        engine.scheduler.block_manager.check_integrity(engine.scheduler.running.rows)
        step += 1
        assert step < 5000
    manager = engine.scheduler.block_manager
    assert manager.usage == 0
    assert manager.states is None or manager.states.num_free == engine.config.max_num_seqs
    return found


def check(loop: PlainLoop, rows: Sequence[Request], found: dict[int, RequestOutput]) -> None:
    for i, output in found.items():
        token_ids, logprobs, routes = loop.generate(*rows[i])
        assert output.token_ids == token_ids, f"row {i}"
        np.testing.assert_array_equal(output.columns["logprobs"], logprobs)
        assert output.columns[ROUTE].dtype == np.uint8
        assert len(output.columns[ROUTE]) == len(rows[i][0]) + len(token_ids) - 1
        np.testing.assert_array_equal(output.columns[ROUTE], routes)


@pytest.mark.thorough
def test_the_loop_computes_the_model() -> None:
    model = make_toy()
    ids = [(7 * i * i + 3 * i) % 128 for i in range(50)]
    wanted, routes = naive_logits(model, ids)
    loop = PlainLoop(make_toy())
    found = torch.cat([loop.logits(token, i) for i, token in enumerate(ids)])
    torch.testing.assert_close(found.double(), wanted, rtol=1e-4, atol=1e-4)
    params = RequestParams(temperature=0, max_new_tokens=1)
    _, _, recorded = loop.generate(ids, params)
    np.testing.assert_array_equal(np.sort(recorded, -1), np.sort(routes.numpy(), -1))
    assert len(np.unique(recorded)) > 8


@pytest.mark.thorough
@pytest.mark.parametrize(
    ("batched", "prefix_caching", "overlap"),
    some_slow(
        itertools.product([7, 2048], [False, True], [False, True]),
        quick=((7, True, True), (2048, False, True), (2048, True, False)),
    ),
)
def test_any_schedule(loop: PlainLoop, overlap: bool, prefix_caching: bool, batched: int) -> None:
    rows = requests(14, seed=1)
    engine = make_engine(
        make_toy(),
        overlap=overlap,
        prefix_caching=prefix_caching,
        max_batched_tokens=batched,
        block_size=8,
    )
    found = run(engine, rows)
    assert len(found) == len(rows)
    check(loop, rows, found)
    if prefix_caching:
        assert engine.stats.cached_tokens > 0


@pytest.mark.thorough
@settings(max_examples=max(1, settings().max_examples // 25), deadline=None)
@given(data=st.data())
def test_hypothesis_finds_no_schedule_that_matters(loop: PlainLoop, data: st.DataObject) -> None:
    rows = requests(10, seed=data.draw(st.integers(0, 3), label="rows"))
    block_size = data.draw(st.sampled_from([1, 4, 8, 16]), label="block size")
    with pytest.MonkeyPatch.context() as patch:
        if data.draw(st.booleans(), label="short rows are expected"):
            expect_short_rows(patch)
        tokens = data.draw(st.sampled_from([128, 200, 1000]), label="cache")
        engine = make_engine(
            make_toy(),
            overlap=data.draw(st.booleans(), label="overlap"),
            prefix_caching=data.draw(st.booleans(), label="prefix caching"),
            state_checkpoints=data.draw(st.sampled_from([0, 1, 2, None]), label="checkpoints"),
            max_num_seqs=data.draw(st.integers(1, 7), label="rows in flight"),
            max_batched_tokens=data.draw(st.sampled_from([1, 5, 64, 2048]), label="batched"),
            chunk_tokens=data.draw(st.sampled_from([0, 1, 16]), label="chunk"),
            block_size=block_size,
            kv_cache_gib=cache_gib(tokens, block_size),
        )
        aborts = data.draw(
            st.dictionaries(st.integers(0, 30), st.lists(st.integers(0, 9), max_size=2)),
            label="aborts",
        )
        found = run(engine, rows, aborts)
    gone = {i for rows_ in aborts.values() for i in rows_}
    assert set(found) >= set(range(10)) - gone
    check(loop, rows, found)


def cache_gib(tokens: int, block_size: int) -> float:
    """Room for so many tokens of the toy and the scratch block, which takes a block more."""
    layers, routes = 1, 4 * 2
    return (tokens + block_size) * (layers * 2 * 2 * 16 * 4 + routes) / 2**30


@pytest.mark.thorough
def test_preempted_rows_begin_again_where_a_checkpoint_is(
    loop: PlainLoop, monkeypatch: pytest.MonkeyPatch
) -> None:
    expect_short_rows(monkeypatch)
    rows = [
        ([5 + i, *range(40, 72)], RequestParams(temperature=0, max_new_tokens=40)) for i in range(4)
    ]
    engine = make_engine(make_toy(), kv_cache_gib=cache_gib(160, 8), block_size=8)
    check(loop, rows, run(engine, rows))
    assert engine.stats.preemptions > 0


@pytest.mark.thorough
@pytest.mark.parametrize("multiple", some_slow([1, 4, 16], quick=(4,)))
def test_samples_of_one_prompt_compute_it_once(loop: PlainLoop, multiple: int) -> None:
    prompt = [3 + i % 100 for i in range(75)]
    rows = [
        (prompt, RequestParams(temperature=1.0, max_new_tokens=5, seed=seed)) for seed in range(6)
    ]
    engine = make_engine(make_toy(chunk_multiple=multiple), block_size=8, max_num_seqs=6)
    check(loop, rows, run(engine, rows))
    step = max(multiple, 8)
    shared = 74 // step * step
    assert engine.stats.cached_tokens == 5 * shared
    assert engine.stats.prefill_tokens == 75 + 5 * (75 - shared)


@pytest.mark.thorough
def test_a_third_prompt_starts_where_two_others_part(loop: PlainLoop) -> None:
    """The second leaves a checkpoint where it goes on otherwise than the first."""
    common = [9 + i for i in range(32)]
    params = RequestParams(temperature=0, max_new_tokens=3)
    rows = [([*common, *range(3 + 20 * i, 15 + 20 * i)], params) for i in range(3)]
    engine = make_engine(make_toy(), block_size=8, max_num_seqs=1)
    found: list[int] = []
    for row in rows:
        before = engine.stats.cached_tokens
        check(loop, [row], run(engine, [row]))
        found.append(engine.stats.cached_tokens - before)
    assert found == [0, 0, 32]


@pytest.mark.thorough
def test_a_slot_with_garbage_is_started_from_zero(loop: PlainLoop) -> None:
    """A row that failed leaves NaN in its state; the next one in its slot must not see that."""
    engine = make_engine(make_toy(), prefix_caching=False, max_num_seqs=2)
    rows = requests(6, seed=5)
    states = engine._runner.states
    assert states is not None
    for cache in states.layers:
        for values in (*cache.state.values(), *cache.records.values()):
            values.fill_(float("nan"))
    cache.pending.fill_(1)
    check(loop, rows, run(engine, rows))


@pytest.mark.thorough
@pytest.mark.parametrize("k", some_slow(range(1, 8), quick=(4,)))
def test_drafts_that_fall_anywhere_are_taken_back(loop: PlainLoop, k: int) -> None:
    rows = requests(12, seed=20 + k, lengths=[1, 9, 40, 45])
    answers = {str(i): loop.generate(*row)[0] for i, row in enumerate(rows)}
    strategy = ForcedStrategy(answers, k, seed=k)
    engine = make_engine(make_toy(), strategy, block_size=8, max_num_seqs=5, overlap=False)
    strategy._engine = engine
    found = run(engine, rows, aborts={6: [3], 9: [0, 5]})
    check(loop, rows, found)
    assert len(found) >= 9
    assert all(strategy.held), "the case is about every number of drafts that can hold"


@pytest.mark.thorough
@pytest.mark.parametrize(
    ("overlap", "k"),
    some_slow(itertools.product([False, True], range(1, 8)), quick=((True, 3),)),
)
def test_ngram_drafts(loop: PlainLoop, k: int, overlap: bool) -> None:
    # Greedy rows of a random model soon repeat themselves.
    rows = [
        (prompt, replace(params, temperature=0.7 * (i % 3 == 0), repetition_penalty=1.0))
        for i, (prompt, params) in enumerate(requests(9, seed=40 + k, lengths=[20, 40, 55]))
    ]
    strategy = ARSpecStrategy(num_spec_tokens=k, adaptive=False, ngram_min=1)
    engine = make_engine(
        make_toy(),
        strategy,
        block_size=8,
        overlap=overlap,
        max_batched_tokens=20,
        kv_cache_gib=cache_gib(240, 8),
    )
    check(loop, rows, run(engine, rows))
    assert engine.stats.counts["num_accepted_tokens"] > 0


@pytest.mark.thorough
def test_drafts_whose_number_follows_the_clock(loop: PlainLoop) -> None:
    """The costs of steps are measured on the scratch slot."""
    rows = requests(6, seed=60, lengths=[20, 30])
    engine = make_engine(make_toy(), ARSpecStrategy(num_spec_tokens=3, ngram_min=1))
    check(loop, rows, run(engine, rows))


def test_options_that_states_do_not_allow_are_refused() -> None:
    draft = ARSpecStrategy("draft", draft_model="x", adaptive=False)
    config = EngineConfig(max_model_len=96, kv_cache_gib=0.01)
    with pytest.raises(ValueError, match="the draft model has recurrent layers"):
        LLMEngine(make_toy(), None, (), draft, config, others={"draft": make_toy()})
    with pytest.raises(ValueError, match="needs a diffusion model"):
        LLMEngine(make_toy(), None, (), DLLMStrategy(4), config)
    with pytest.raises(ValueError, match=r"max_batched_tokens is 8, but .* multiples of 64"):
        make_engine(make_toy(chunk_multiple=64), max_batched_tokens=8)
    with pytest.raises(ValueError, match="has no context column 'experts'; it has toy_route"):
        LLMEngine(make_toy(), None, (), ARStrategy(), config, context_columns=["experts"])


def test_only_the_rows_that_ask_get_the_column(loop: PlainLoop) -> None:
    engine = make_engine(make_toy())
    engine.add_request("with", [5, 6, 7], RequestParams(max_new_tokens=4, columns=(ROUTE,)))
    engine.add_request("without", [5, 6, 7], RequestParams(max_new_tokens=4))
    found: dict[str, RequestOutput] = {}
    while engine.has_unfinished():
        found |= {output.request_id: output for output in engine.step()}
    assert list(found["with"].columns) == [ROUTE] and not found["without"].columns
    assert found["with"].token_ids == found["without"].token_ids


def test_the_plan_counts_states() -> None:
    model = make_toy()
    engine = make_engine(model, max_num_seqs=3, state_checkpoints=5)
    per_state = 3 * 2 * 64 * 4  # three recurrent layers of two vectors
    records = 3 * 2 * 3 * 64 * 4  # in two halves, three vectors
    assert engine.memory.row_states == 4 * (per_state + records)
    assert engine.memory.checkpoints == 5 * per_state and engine.memory.num_checkpoints == 5
    assert "row states 0.00 GiB, state snapshots 0.00 GiB (5)" in str(engine.memory)


@pytest.mark.gpu
@pytest.mark.parametrize("k", [0, 1, 3])
@pytest.mark.parametrize("overlap", [False, True])
@pytest.mark.parametrize("graph", [False, True])
def test_on_a_gpu(graph: bool, overlap: bool, k: int) -> None:
    """Captured decode, mixed and prefill steps, in a loop that never waits."""
    rows = requests(40, seed=3, lengths=(1, 9, 30))
    loop = PlainLoop(make_toy("cuda"))
    strategy = ARSpecStrategy(num_spec_tokens=k, adaptive=False, ngram_min=1) if k else None
    engine = make_engine(
        make_toy("cuda"),
        strategy,
        cuda_graph=graph,
        overlap=overlap,
        max_num_seqs=24,
        block_size=8,
        chunk_tokens=32,
        max_batched_tokens=300,
        kv_cache_gib=cache_gib(900, 8),
    )
    same = total = 0
    for i, output in run(engine, rows, aborts={5: [7], 11: [30, 31]}).items():
        token_ids, logprobs, routes = loop.generate(*rows[i])
        assert output.token_ids == token_ids, f"row {i}"
        np.testing.assert_allclose(output.columns["logprobs"], logprobs, atol=1e-4)
        assert output.columns[ROUTE].shape == routes.shape
        # Values that all but tie may change their order.
        same += int((np.sort(output.columns[ROUTE], -1) == np.sort(routes, -1)).sum())
        total += routes.size
    assert same > 0.99 * total
    assert engine.stats.cached_tokens > 0
