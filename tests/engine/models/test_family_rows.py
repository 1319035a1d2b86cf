"""Rows of families that keep nothing but tokens: the same bits however scheduled, and transformers'
choices.

What a row says alone, with its prompt read in one forward, is held against every other way.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn
from transformers import AutoModelForCausalLM

from batchgen.engine.caches.model_caches import paged_token_bytes, window_token_bytes
from batchgen.engine.interface.engine_config import EngineConfig
from batchgen.engine.interface.outputs import RequestOutput
from batchgen.engine.llm_engine import LLMEngine
from batchgen.engine.loading.loader import load_model
from batchgen.engine.models.causal_lm import CausalLM
from batchgen.engine.models.moe_model import ROUTED_EXPERTS
from batchgen.engine.sampling.sampling_params import RequestParams
from batchgen.engine.strategy import Strategy
from batchgen.strategies.ar.strategy import ARStrategy
from batchgen.strategies.ar_spec.strategy import ARSpecStrategy
from tests.support.engine.alone_rows import Alone
from tests.support.engine.engine_rows import Request, expect_short_rows, run
from tests.support.engine.forced_drafts import ForcedStrategy
from tests.support.engine.routers import ids_of
from tests.support.engine.tiny_models import CLASSES, CONVS, MAMBA

TinyModel = Callable[..., Path]
CPU = torch.device("cpu")
LATENT = ("deepseek_v2", "deepseek_v3", "glm4_moe_lite")
GEMMA = ("gemma3_text", "gemma3", "gemma4_text", "gemma4_e2b")
SPARSE = (
    "mixtral", "dots1", "granitemoe", "ernie4_5_moe", "exaone_moe", "hunyuan_v1_moe", "olmoe",
)  # fmt: skip
DENSE = (
    "ministral3",
    "mistral3",
    "olmo3",
    "smollm3",
    *GEMMA,
    *sorted(CLASSES.keys() - {*SPARSE, *MAMBA, *CONVS}),
)
KINDS = (*LATENT, "glm4_moe", "minimax_m2", "gpt_oss", "gemma4_moe", *SPARSE, *DENSE)


def load(folder: Path, device: torch.device = CPU) -> CausalLM:
    return load_model(folder, device=device, dtype=torch.float32)


def make_engine(model: CausalLM, strategy: Strategy | None = None, **config: Any) -> LLMEngine:
    options: dict[str, Any] = {"max_model_len": 256, "kv_cache_gib": 0.01, "max_num_seqs": 6}
    columns = model.declared_columns(model.config)
    return LLMEngine(
        model,
        None,
        (),
        strategy or ARStrategy(),
        EngineConfig(**options | config),
        context_columns=[column.name for column in columns],
    )


def columns_of(kind: str) -> tuple[str, ...]:
    return () if kind in DENSE else (ROUTED_EXPERTS,)


def requests(
    seed: int,
    count: int = 8,
    temperatures: Sequence[float] = (0, 0.8),
    columns: tuple[str, ...] = (ROUTED_EXPERTS,),
) -> list[Request]:
    """Prompts of which some begin alike, with up to three samples."""
    rng = random.Random(seed)
    common = [rng.randrange(3, 128) for _ in range(90)]
    rows: list[Request] = []
    while len(rows) < count:
        own = [rng.randrange(3, 128) for _ in range(rng.choice([1, 5, 40]))]
        prompt = [*common[: rng.choice([0, 20, 64, 90])], *own]
        for _ in range(rng.randint(1, 3)):
            params = RequestParams(
                temperature=rng.choice(temperatures),
                max_new_tokens=rng.choice([1, 6, 20]),
                seed=rng.randrange(4),
                logprobs=True,
                columns=columns,
            )
            rows.append((prompt, params))
    return rows[:count]


FAST = ("deepseek_v3", "minimax_m2", "gpt_oss")


@pytest.fixture(
    scope="module",
    params=[k if k in FAST else pytest.param(k, marks=pytest.mark.slow) for k in KINDS],
)
def kind(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.fixture(scope="module")
def columns(kind: str) -> tuple[str, ...]:
    return columns_of(kind)


@pytest.fixture(scope="module")
def folder(kind: str, tiny_model: TinyModel) -> Path:
    return tiny_model(kind, **{"q_lora_rank": None} if kind == "deepseek_v2" else {})


@pytest.fixture(scope="module")
def alone(folder: Path) -> Alone:
    return Alone(make_engine(load(folder), max_num_seqs=1, prefix_caching=False), run)


def cache_gib(folder: Path, tokens: int) -> float:
    model = load(folder)
    columns = model.declared_columns(model.config)
    of_token = paged_token_bytes(model.cache_specs, columns, torch.float32)
    # Besides, the windows of a few rows, and what rows leave unused in pages.
    of_window = 13 * 16 * window_token_bytes(model.cache_specs, torch.float32)
    return ((tokens + 16) * of_token + of_window) * (1.2 if of_window else 1) / 2**30


@pytest.mark.quick(1, thorough=2)
@pytest.mark.parametrize(
    ("batched", "overlap", "block_size"),
    [(48, True, 4), (2048, False, 16), pytest.param(6, False, 4, marks=pytest.mark.slow)],
)
def test_any_schedule(
    alone: Alone,
    folder: Path,
    columns: tuple[str, ...],
    batched: int,
    overlap: bool,
    block_size: int,
) -> None:
    rows = requests(seed=1, columns=columns)
    engine = make_engine(
        load(folder), overlap=overlap, max_batched_tokens=batched, block_size=block_size
    )
    alone.check(rows, run(engine, rows))
    assert engine.stats.cached_tokens > 0


@pytest.mark.quick(0, thorough=1)
def test_rows_that_lose_their_caches(
    alone: Alone, folder: Path, columns: tuple[str, ...], monkeypatch: pytest.MonkeyPatch
) -> None:
    """What they had generated is read again as part of their prompt."""
    expect_short_rows(monkeypatch)
    params = RequestParams(max_new_tokens=40, seed=3, logprobs=True, columns=columns)
    rows = [([3 + (i + 2) * j % 125 for j in range(20 + 9 * i)], params) for i in range(6)]
    small: dict[str, Any] = {"max_model_len": 128, "kv_cache_gib": cache_gib(folder, 128)}
    engine = make_engine(load(folder), max_batched_tokens=32, **small)
    alone.check(rows, run(engine, rows))
    assert engine.stats.preemptions


@pytest.mark.quick(0, thorough=2)
def test_drafts_that_fall_anywhere_are_taken_back(
    alone: Alone, folder: Path, columns: tuple[str, ...]
) -> None:
    rows = requests(seed=20, columns=columns)
    answers = {str(i): alone(row).token_ids for i, row in enumerate(rows)}
    strategy = ForcedStrategy(answers, k=3, seed=3)
    engine = make_engine(load(folder), strategy, max_num_seqs=4)
    strategy._engine = engine
    alone.check(rows, run(engine, rows))
    assert all(strategy.held)


@pytest.mark.quick(0, thorough=2)
@pytest.mark.parametrize(
    "k", [3, *(pytest.param(k, marks=pytest.mark.slow) for k in (1, 2, 4, 5, 6, 7))]
)
def test_ngram_drafts(alone: Alone, folder: Path, columns: tuple[str, ...], k: int) -> None:
    rows = requests(seed=40, count=4, columns=columns)
    strategy = ARSpecStrategy(num_spec_tokens=k, adaptive=False, ngram_min=1)
    engine = make_engine(load(folder), strategy, overlap=True, max_batched_tokens=64)
    alone.check(rows, run(engine, rows))
    assert engine.stats.counts["num_draft_tokens"] > 0


@pytest.mark.quick(2, thorough=6)
@pytest.mark.parametrize("kind", KINDS)
def test_greedy_tokens_log_probabilities_and_experts(
    kind: str, tiny_model: TinyModel, reference_logits: Callable[[Path, list[int]], torch.Tensor]
) -> None:
    """In small chunks; the layer without experts has no entry in the column."""
    if not (columns := columns_of(kind)):
        rows = requests(seed=7, count=3, temperatures=(0,), columns=())
        engine = make_engine(load(tiny_model(kind)), max_batched_tokens=32, block_size=4)
        for (prompt, _), output in zip(rows, run(engine, rows), strict=True):
            logits = reference_logits(tiny_model(kind), prompt + output.token_ids)
            check_greedy(output, logits[len(prompt) - 1 : -1].log_softmax(-1))
        return
    theirs = AutoModelForCausalLM.from_pretrained(tiny_model(kind), dtype=torch.float32)
    layers = theirs.model.layers
    moe = "block_sparse_moe" if kind == "granitemoe" else "mlp"
    parts = [layer if hasattr(layer, "router") else getattr(layer, moe) for layer in layers]
    routers = [getattr(p, "router", None) or p.gate for p in parts if hasattr(p, "experts")]
    chosen: list[list[set[int]]] = []

    def note(_router: nn.Module, _args: object, result: tuple[torch.Tensor, ...]) -> None:
        chosen.append([set(ids) for ids in ids_of(result).tolist()])

    for router in routers:
        router.register_forward_hook(note)
    rows = requests(seed=7, count=3, temperatures=(0,), columns=columns)
    engine = make_engine(load(tiny_model(kind)), max_batched_tokens=32, block_size=4)
    for (prompt, _), output in zip(rows, run(engine, rows), strict=True):
        chosen.clear()
        ids = prompt + output.token_ids
        with torch.inference_mode():
            logprobs = theirs(torch.tensor([ids])).logits[0].log_softmax(-1)[len(prompt) - 1 : -1]
        check_greedy(output, logprobs)
        found = output.columns[ROUTED_EXPERTS]
        assert found.shape == (len(ids) - 1, len(routers), 3)
        for layer in range(len(routers)):
            assert [set(row) for row in found[:, layer].tolist()] == chosen[layer][:-1]


def check_greedy(output: RequestOutput, logprobs: torch.Tensor) -> None:
    """Tokens and their log-probabilities are those of transformers' [tokens, vocab]."""
    assert output.token_ids == logprobs.argmax(-1).tolist()
    np.testing.assert_allclose(
        output.columns["logprobs"], logprobs.max(-1).values.numpy(), atol=1e-4
    )


@pytest.mark.gpu
@pytest.mark.parametrize("cuda_graph", [False, True])
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("drafts", [False, True])
def test_a_gpu_gives_the_tokens_of_a_cpu(
    kind: str, drafts: bool, cuda_graph: bool, tiny_model: TinyModel
) -> None:
    rows = requests(seed=3, count=12, temperatures=(0,), columns=columns_of(kind))
    made = []
    for device in ("cpu", "cuda"):
        strategy = ARSpecStrategy(num_spec_tokens=3, adaptive=False) if drafts else ARStrategy()
        config: dict[str, Any] = {} if device == "cpu" else {"cuda_graph": cuda_graph}
        model = load(tiny_model(kind), torch.device(device))
        made.append(run(make_engine(model, strategy, **config), rows))
    for cpu, gpu in zip(*made, strict=True):
        assert cpu.token_ids == gpu.token_ids
