"""The column of routed experts against transformers' routers, in every paradigm."""

from __future__ import annotations

import itertools
import random
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from transformers import PreTrainedModel, Qwen3MoeForCausalLM

from batchgen.engine.interface.engine_config import EngineConfig
from batchgen.engine.interface.outputs import RequestOutput
from batchgen.engine.llm_engine import LLMEngine
from batchgen.engine.loading.loader import load_model
from batchgen.engine.models.moe_model import ROUTED_EXPERTS
from batchgen.engine.sampling.sampling_params import RequestParams
from batchgen.engine.strategy import Strategy
from batchgen.strategies.ar.strategy import ARStrategy
from batchgen.strategies.ar_spec.strategy import ARSpecStrategy
from batchgen.strategies.dllm.strategy import DLLMStrategy
from tests.support.cases import some_slow
from tests.support.engine.dllm_reference import Options, generate, model_forward
from tests.support.engine.engine_rows import Request, expect_short_rows
from tests.support.engine.routers import router_ids

TinyModel = Callable[..., Path]
CPU = torch.device("cpu")
IDS = [(7 * i * i + 3 * i) % 128 for i in range(100)]
TIGHT: dict[str, Any] = {
    "max_batched_tokens": 16, "block_size": 4, "kv_cache_gib": 0.00005, "max_model_len": 48
}  # fmt: skip
"""Prompts are read in chunks, and the cache is too small for all rows at once."""


@pytest.fixture(scope="module")
def theirs(tiny_model: TinyModel) -> PreTrainedModel:
    """Two of its three layers have experts."""
    model: PreTrainedModel = Qwen3MoeForCausalLM.from_pretrained(
        folder_of(tiny_model), dtype=torch.float32, attn_implementation="eager"
    )
    model.eval()
    return model


def folder_of(tiny_model: TinyModel, kind: str = "qwen3_moe") -> Path:
    return tiny_model(kind, mlp_only_layers=[1])


def make_engine(
    tiny_model: TinyModel,
    strategy: Strategy,
    kind: str = "qwen3_moe",
    *,
    device: str = "cpu",
    draft: dict[str, Any] | None = None,
    **config: Any,
) -> LLMEngine:
    def load(folder: Path) -> Any:
        return load_model(folder, device=torch.device(device), dtype=torch.float32)

    values: dict[str, Any] = {"max_model_len": 96, "kv_cache_gib": 0.02} | config
    return LLMEngine(
        load(folder_of(tiny_model, kind)),
        None,
        (),
        strategy,
        EngineConfig(**values),
        others={} if draft is None else {"draft": load(tiny_model("qwen3_moe", **draft))},
        context_columns=[ROUTED_EXPERTS],
    )


def rows(count: int = 7, **params: Any) -> list[Request]:
    """Rows of one beginning and of others, some greedy; the last prompt comes twice."""
    made = []
    for i in range(count):
        prompt = IDS[:9] + IDS[i : i + 3 * i] if i % 2 else IDS[i : i + 1 + 2 * i]
        options = {"temperature": 0.0 if i % 3 else 0.8, "max_new_tokens": 5 + 3 * i, "seed": i}
        made.append((prompt, RequestParams(**options | params, columns=(ROUTED_EXPERTS,))))
    return [*made, (made[-1][0], replace(made[-1][1], temperature=0.9, seed=99))]


def run(engine: LLMEngine, requests: Sequence[Request]) -> list[RequestOutput]:
    for i, (prompt, params) in enumerate(requests):
        engine.add_request(str(i), prompt, params)
    found: dict[str, RequestOutput] = {}
    while engine.has_unfinished():
        found |= {output.request_id: output for output in engine.step()}
    return [found[str(i)] for i in range(len(requests))]


def check(model: PreTrainedModel, outputs: Sequence[RequestOutput]) -> None:
    for output in outputs:
        ids = output.prompt_token_ids + output.token_ids
        found = output.columns[ROUTED_EXPERTS]
        assert found.dtype == np.uint8 and found.shape == (len(ids) - 1, 2, 3)
        assert found.tolist() == router_ids(model, ids)[:-1].tolist()


@pytest.mark.quick(1)
@pytest.mark.parametrize("overlap", some_slow([False, True], quick=[True]))
def test_ar(
    overlap: bool, tiny_model: TinyModel, theirs: PreTrainedModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    expect_short_rows(monkeypatch)
    engine = make_engine(tiny_model, ARStrategy(), overlap=overlap, **TIGHT)
    check(theirs, run(engine, rows()))
    assert engine.stats.preemptions and engine.stats.cached_tokens


def test_rows_that_do_not_ask_have_none(tiny_model: TinyModel, theirs: PreTrainedModel) -> None:
    engine = make_engine(tiny_model, ARStrategy())
    requests = rows()
    requests[0] = requests[0][0], replace(requests[0][1], columns=())
    first, *others = run(engine, requests)
    assert ROUTED_EXPERTS not in first.columns
    check(theirs, others)


def test_nothing_is_kept_if_nobody_can_ask(tiny_model: TinyModel) -> None:
    model = load_model(folder_of(tiny_model), device=CPU)
    engine = LLMEngine(model, None, (), ARStrategy(), EngineConfig(kv_cache_gib=0.001))
    with_column = make_engine(tiny_model, ARStrategy(), kv_cache_gib=0.001)
    assert with_column.memory.num_blocks < engine.memory.num_blocks
    with pytest.raises(ValueError, match="has no column 'routed_experts'"):
        engine.add_request("0", [1], RequestParams(columns=(ROUTED_EXPERTS,)))


@pytest.mark.thorough
@pytest.mark.parametrize(
    ("proposer", "k"),
    [
        pytest.param(proposer, k, marks=[] if (proposer, k) in quick else [pytest.mark.slow])
        for quick in [{("ngram", 5), ("draft", 3)}]
        for proposer in ("ngram", "draft")
        for k in range(1, 6)
    ],
)
def test_ar_spec(
    proposer: Any,
    k: int,
    tiny_model: TinyModel,
    theirs: PreTrainedModel,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The draft model has experts as well: other ones, in all of its layers."""
    expect_short_rows(monkeypatch)
    draft = {"num_experts": 5, "num_experts_per_tok": 2} if proposer == "draft" else None
    strategy = ARSpecStrategy(
        proposer, k, adaptive=False, draft_model="draft" if draft is not None else None
    )
    # Block tables are shared, so a draft model needs as much of the cache again.
    config = TIGHT | {"kv_cache_gib": 0.00005 if draft is None else 0.0001}
    engine = make_engine(tiny_model, strategy, draft=draft, overlap=bool(k % 2), **config)
    check(theirs, run(engine, rows()))
    assert engine.stats.preemptions and engine.stats.cached_tokens


@pytest.mark.thorough
@pytest.mark.parametrize(
    ("kind", "overlap", "fused"),
    [
        pytest.param(*case, marks=[] if case in quick else [pytest.mark.slow])
        for quick in [
            {("roomy", False, False), ("overfull", True, False), ("overfull", True, True)}
        ]
        for case in itertools.product(("overfull", "roomy"), (False, True), (False, True))
    ],
)
def test_dllm(
    kind: str,
    overlap: bool,
    fused: bool,
    tiny_model: TinyModel,
    theirs: PreTrainedModel,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The experts are those of the forward that reads the whole block, to its end even if the row
    ends before."""
    expect_short_rows(monkeypatch)
    length, threshold = 4, 0.05
    strategy = DLLMStrategy(length, confidence_threshold=threshold, fused_commit=fused)
    config = TIGHT if kind == "overfull" else {}
    engine = make_engine(tiny_model, strategy, "sdar_moe", overlap=overlap, **config)
    requests = rows(stop_token_ids=tuple(range(3, 12)))
    options = Options(
        block_length=length,
        mask_token_id=127,
        unmasking="low_confidence_dynamic",
        confidence_threshold=threshold,
    )
    cut = 0
    forward = model_forward(theirs, length)
    for (prompt, params), output in zip(requests, run(engine, requests), strict=True):
        wanted = generate(forward, prompt, params, options)
        assert output.token_ids == wanted.token_ids
        experts = router_ids(theirs, wanted.ids, length)[: len(prompt) + len(wanted.token_ids) - 1]
        assert output.columns[ROUTED_EXPERTS].tolist() == experts.tolist()
        cut += len(wanted.ids) > len(prompt) + len(wanted.token_ids)
    assert cut, "no row ended within a block"
    assert bool(engine.stats.preemptions) == (kind == "overfull")


@pytest.mark.thorough
def test_counts_of_diffusion_depend_on_the_row_alone(
    tiny_model: TinyModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whether commits find room or not, and after a preemption."""
    expect_short_rows(monkeypatch)
    requests = rows(stop_token_ids=tuple(range(3, 12)))

    def counts(**config: Any) -> list[Mapping[str, int]]:
        strategy = DLLMStrategy(4, confidence_threshold=0.05)
        engine = make_engine(tiny_model, strategy, "sdar_moe", **config)
        found = [output.counts for output in run(engine, requests)]
        assert bool(engine.stats.preemptions) == (config == TIGHT)
        return found

    expected = counts()
    assert {each["num_commit_forwards"] for each in expected} == {0, 1}
    assert counts(**TIGHT) == expected
    draws = random.Random(0)
    monkeypatch.setattr(DLLMStrategy, "_room", lambda self, rows: draws.choice((0, 0, 1, rows)))
    assert counts(overlap=True) == expected


@pytest.mark.thorough
@pytest.mark.parametrize("experts", [256, 257])
def test_more_than_256_experts_take_two_bytes(experts: int, tiny_model: TinyModel) -> None:
    sizes = {"num_experts": experts, "moe_intermediate_size": 4, "num_hidden_layers": 1}
    folder = tiny_model("qwen3_moe", **sizes)
    model = load_model(folder, device=CPU)
    engine = LLMEngine(
        model, None, (), ARStrategy(), EngineConfig(kv_cache_gib=0.001),
        context_columns=[ROUTED_EXPERTS],
    )  # fmt: skip
    (output,) = run(engine, rows(1)[:1])
    ids = output.prompt_token_ids + output.token_ids
    reference = Qwen3MoeForCausalLM.from_pretrained(folder, dtype=torch.float32)
    found = output.columns[ROUTED_EXPERTS]
    assert found.dtype == (np.uint8 if experts == 256 else np.uint16)
    assert found.tolist() == router_ids(reference, ids)[:-1].tolist()


@pytest.mark.gpu
@pytest.mark.parametrize("overlap", [False, True])
@pytest.mark.parametrize("cuda_graph", [False, True])
@pytest.mark.parametrize("paradigm", ["ar", "ngram", "draft", "dllm"])
def test_a_gpu_gives_the_tokens_and_experts_of_a_cpu(
    paradigm: Any, cuda_graph: bool, overlap: bool, tiny_model: TinyModel
) -> None:
    made = []
    for device in ("cpu", "cuda"):
        draft = {"num_experts": 5, "num_experts_per_tok": 2} if paradigm == "draft" else None
        strategy: Strategy = ARStrategy()
        if paradigm in ("ngram", "draft"):
            strategy = ARSpecStrategy(
                paradigm, 3, adaptive=False, draft_model=None if draft is None else "draft"
            )
        elif paradigm == "dllm":
            strategy = DLLMStrategy(4, confidence_threshold=0.05)
        kind = "sdar_moe" if paradigm == "dllm" else "qwen3_moe"
        config: dict[str, Any] = {} if device == "cpu" else {"cuda_graph": cuda_graph}
        engine = make_engine(
            tiny_model, strategy, kind, device=device, draft=draft, overlap=overlap, **config
        )
        made.append(run(engine, rows(temperature=0)))
    for cpu, gpu in zip(*made, strict=True):
        assert cpu.token_ids == gpu.token_ids
        assert cpu.columns[ROUTED_EXPERTS].tolist() == gpu.columns[ROUTED_EXPERTS].tolist()
