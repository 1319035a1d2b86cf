"""Rows that go on in another engine are those of an undisturbed run, to the bit."""

from __future__ import annotations

import random
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

pytest.importorskip("xgrammar")

from batchgen.engine.interface.engine_config import EngineConfig
from batchgen.engine.interface.outputs import Begun, RequestOutput
from batchgen.engine.llm_engine import LLMEngine
from batchgen.engine.loading.loader import load_model
from batchgen.engine.models.moe_model import ROUTED_EXPERTS
from batchgen.engine.rows.sequence import Sequence as Row
from batchgen.engine.sampling.sampling_params import RequestParams
from batchgen.engine.strategy import Strategy
from batchgen.strategies.ar.strategy import ARStrategy
from batchgen.strategies.ar_spec.strategy import ARSpecStrategy
from batchgen.strategies.dllm.strategy import DLLMStrategy
from tests.strategies.dllm import test_dllm, test_dllm_guided
from tests.support.engine import constrained_rows, grammars
from tests.support.engine.begun_rows import assert_same, run_in_sessions
from tests.support.engine.engine_rows import Request, run
from tests.support.engine.toy_mtp import with_head

TinyModel = Callable[..., Path]
Make = Callable[[], LLMEngine]
CPU = torch.device("cpu")
AR_SPEC: Mapping[str, Callable[[], Strategy]] = {
    "ar": ARStrategy,
    "ngram": lambda: ARSpecStrategy("ngram", 3, adaptive=False, ngram_min=1),
    "draft": lambda: ARSpecStrategy("draft", 2, adaptive=False),
    "rejection": lambda: ARSpecStrategy("draft", 3, "rejection", adaptive=False),
    "head": lambda: ARSpecStrategy("mtp", 3, adaptive=False),
}


def unconstrained(rows: Sequence[Request]) -> list[Request]:
    return [(prompt, replace(params, constraint=None)) for prompt, params in rows]


def autoregressive(tiny_model: TinyModel, kind: str) -> tuple[Make, list[Request]]:
    """Rows of every option and constraint, in a cache in which some are preempted as well."""
    folder = tiny_model("llama", vocab_size=constrained_rows.WIDTH)
    model = with_head(folder) if kind == "head" else constrained_rows.load(folder)
    smaller = tiny_model("llama", vocab_size=constrained_rows.WIDTH, num_hidden_layers=1)
    draft = constrained_rows.load(smaller) if kind in ("draft", "rejection") else None
    config = EngineConfig(max_num_seqs=6, max_model_len=90, kv_cache_gib=0.004, block_size=4)

    def make() -> LLMEngine:
        return LLMEngine(
            model,
            constrained_rows.make_tokenizer(),
            (constrained_rows.END,),
            AR_SPEC[kind](),
            config,
            others={} if draft is None else {"draft": draft},
            compiler=constrained_rows.compiler(),
        )

    return make, constrained_rows.mixed_requests(22, seed=3)


def diffusion(tiny_model: TinyModel, kind: str) -> tuple[Make, list[Request]]:
    rule = test_dllm.RULES[3 if kind == "static" else 4]
    if kind == "guided":
        model = load_model(tiny_model("sdar", **test_dllm_guided.MODEL), device=CPU)
        rows = test_dllm.requests(4, 14, longest=40)
        constraints = constrained_rows.CONSTRAINTS
        rows = [
            (
                [token_id % 100 for token_id in prompt],
                replace(params, constraint=constraints[i], ignore_eos=False) if i % 3 else params,
            )
            for i, (prompt, params) in enumerate(rows)
        ]
        tokenizer, eos, compiler = grammars.make_tokenizer(), (grammars.END,), grammars.compiler()
    else:
        model = load_model(tiny_model("sdar"), device=CPU)
        rows = test_dllm.requests(3, 14, longest=40)
        tokenizer, eos, compiler = None, test_dllm.EOS, None
    config = EngineConfig(max_model_len=128, kv_cache_gib=0.02, max_num_seqs=6)

    def make() -> LLMEngine:
        strategy = DLLMStrategy(4, **rule)
        return LLMEngine(model, tokenizer, eos, strategy, config, compiler=compiler)

    return make, rows


def routed(tiny_model: TinyModel, kind: str) -> tuple[Make, list[Request]]:
    """Rows with a column of context scope, of models with windows and recurrent layers too."""
    sizes: dict[str, Any] = {"mlp_only_layers": [1]} if kind in ("qwen3_moe", "sdar_moe") else {}
    if kind == "qwen3_5_moe_text":
        sizes = {"num_hidden_layers": 2, "layer_types": ["linear_attention", "full_attention"]}
    model = load_model(tiny_model(kind, **sizes), device=CPU, dtype=torch.float32)
    rng = random.Random(5)
    rows = [
        (
            [rng.randrange(3, 100) for _ in range(rng.choice([2, 9, 70]))],
            RequestParams(
                temperature=0.8 * (i % 2),
                max_new_tokens=8 + 3 * i,
                seed=i,
                logprobs=True,
                top_logprobs=i % 3,
                columns=(ROUTED_EXPERTS,),
            ),
        )
        for i in range(9)
    ]
    config = EngineConfig(max_model_len=128, kv_cache_gib=0.01, max_num_seqs=5)

    def make() -> LLMEngine:
        strategy = DLLMStrategy(4, **test_dllm.RULES[4]) if kind == "sdar_moe" else ARStrategy()
        return LLMEngine(model, None, (), strategy, config, context_columns=[ROUTED_EXPERTS])

    return make, rows


CASES: list[tuple[Callable[[TinyModel, str], tuple[Make, list[Request]]], str]] = [
    *((autoregressive, kind) for kind in AR_SPEC),
    *((diffusion, kind) for kind in ("static", "dynamic", "guided")),
    *((routed, kind) for kind in ("qwen3_moe", "qwen3_5_moe_text", "gpt_oss", "sdar_moe")),
]


QUICK = ("ngram", "guided", "qwen3_5_moe_text")
THOROUGH = ("rejection", "head", "dynamic", "gpt_oss")


def marks_of(kind: str) -> list[pytest.MarkDecorator]:
    if kind in QUICK:
        return []
    return [pytest.mark.thorough if kind in THOROUGH else pytest.mark.slow]


@pytest.fixture(
    scope="module",
    params=[pytest.param(case, marks=marks_of(case[1]), id=case[1]) for case in CASES],
)
def case(request: pytest.FixtureRequest, tiny_model: TinyModel) -> tuple[Make, list[Request], Any]:
    prepare, kind = request.param
    make, rows = prepare(tiny_model, kind)
    if kind == "rejection":  # such drafts depend on the schedule where a constraint forces some
        rows = unconstrained(rows)
    return make, rows, run(make(), rows)


@pytest.mark.quick(1, thorough=1)
@given(seed=st.integers(0, 2**32))
@settings(
    max_examples=max(1, settings().max_examples // 500),
    deadline=None,
    suppress_health_check=[HealthCheck.function_scoped_fixture],
)
def test_rows_that_are_stopped_at_any_step(
    case: tuple[Make, list[Request], Any], seed: int
) -> None:
    make, rows, expected = case
    found, again = run_in_sessions(make, rows, random.Random(seed))
    assert_same(found, expected)
    by_schedule = make().strategy.by_schedule
    for one, other in zip(found, expected, strict=True):
        assert {n: v for n, v in one.counts.items() if n not in by_schedule} == {
            n: v for n, v in other.counts.items() if n not in by_schedule
        }
    assert 0 <= again


def changed(begun: Begun, **values: Any) -> Begun:
    return replace(begun, **values)


UNUSABLE: Mapping[str, Callable[[Begun], Begun]] = {
    "nothing": lambda begun: changed(begun, token_ids=[], columns={"logprobs": np.empty(0, "f4")}),
    "no such token": lambda begun: changed(begun, token_ids=[*begun.token_ids[:-1], 10**6]),
    "a negative token": lambda begun: changed(begun, token_ids=[*begun.token_ids[:-1], -1]),
    "a stop id": lambda begun: changed(
        begun, token_ids=[constrained_rows.END, *begun.token_ids[1:]]
    ),
    "a stop string": lambda begun: changed(
        begun, token_ids=constrained_rows.encode("12ab")[: len(begun.token_ids)]
    ),
    "no column": lambda begun: changed(begun, columns={}),
    "a shorter column": lambda begun: changed(
        begun, columns={"logprobs": begun.columns["logprobs"][:-1]}
    ),
    "a wider column": lambda begun: changed(
        begun, columns={"logprobs": begun.columns["logprobs"][:, None]}
    ),
    "as many tokens as the row can have": lambda begun: changed(
        begun,
        token_ids=begun.token_ids * 20,
        columns={"logprobs": np.tile(begun.columns["logprobs"], 20)},
    ),
}


@pytest.fixture(scope="module")
def stopped(tiny_model: TinyModel) -> tuple[Make, Request, RequestOutput, Begun]:
    """A row, its output, and what it had begun when it was stopped."""
    make, _ = autoregressive(tiny_model, "ar")
    params = RequestParams(seed=3, max_new_tokens=30, logprobs=True, stop=("12ab",))
    row = (constrained_rows.encode("ab"), params)
    (expected,) = run(make(), [row])
    first = make()
    first.add_request("0", *row)
    while first.begun_lengths().get("0", 0) < 2:
        first.step()
    begun = first.begun("0")
    assert begun is not None
    assert make().add_request("0", *row, begun=begun)
    return make, row, expected, begun


@pytest.mark.quick(1)
@pytest.mark.parametrize("what", UNUSABLE)
def test_a_row_begins_again_if_it_cannot_go_on(
    stopped: tuple[Make, Request, RequestOutput, Begun], what: str
) -> None:
    make, row, expected, begun = stopped
    again = make()
    assert not again.add_request("0", *row, begun=UNUSABLE[what](begun))
    found = []
    while again.has_unfinished():
        found += again.step()
    assert_same(found, [expected])


def test_a_row_begins_again_if_its_constraint_refuses_what_was_begun(tiny_model: TinyModel) -> None:
    """As a later version of xgrammar may."""
    make, _ = autoregressive(tiny_model, "ar")
    constraint = constrained_rows.CONSTRAINTS[19]
    params = RequestParams(seed=3, max_new_tokens=20, constraint=constraint, stop=("zzz",))
    row = (constrained_rows.encode("ab"), params)
    (expected,) = run(make(), [row])
    engine, ids = make(), constrained_rows.encode("<<<")
    assert engine.add_request("0", *row, begun=Begun(ids))
    found = []
    while engine.has_unfinished():
        found += engine.step()
    assert_same(found, [expected])


@pytest.mark.thorough
def test_records_of_a_row_that_runs_are_of_what_was_read(tiny_model: TinyModel) -> None:
    """A row that has ended is no more among those that are begun; one that waits is."""
    make, rows = autoregressive(tiny_model, "ar")
    engine = make()
    for i, row in enumerate(unconstrained(rows)):
        engine.add_request(str(i), *row)
    outputs: dict[str, RequestOutput] = {}
    while engine.has_unfinished():
        outputs |= {output.request_id: output for output in engine.step()}
        lengths = engine.begun_lengths()
        assert not lengths.keys() & outputs.keys()
        running = engine.scheduler.running.rows
        assert {seq.request_id for seq in running if seq.num_generated} <= lengths.keys()
        for seq in running[:2]:
            assert isinstance(seq, Row)
            if (length := lengths.get(seq.request_id)) is not None:
                begun = engine.begun(seq.request_id, length - 1)
                assert begun is not None and len(begun.token_ids) == 1
    assert len(outputs) == len(rows)
