"""Rows of models with Mamba2 or convolutions: the same bits however scheduled, and the choices
of transformers.

What a row says alone, with its prompt read in one forward, is held against every other way.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM

from batchgen.engine.caches.model_caches import paged_token_bytes
from batchgen.engine.interface import engine_config
from batchgen.engine.models.moe_model import ROUTED_EXPERTS
from batchgen.engine.sampling.sampling_params import RequestParams
from batchgen.strategies.ar_spec.strategy import ARSpecStrategy
from tests.engine.models.test_family_rows import check_greedy, load, make_engine, requests
from tests.support.engine.alone_rows import Alone
from tests.support.engine.engine_rows import expect_short_rows, run
from tests.support.engine.forced_drafts import ForcedStrategy
from tests.support.engine.routers import ids_of
from tests.support.engine.tiny_models import CONVS, MAMBA

TinyModel = Callable[..., Path]
MARKS: dict[str, Any] = {"bamba": (), "lfm2": (), "nemotron_h": pytest.mark.thorough}
"""Cases of families; the others are slow."""
_ROUTERS = ("mixer.gate", "block_sparse_moe.router", "feed_forward.gate")


@pytest.fixture(
    scope="module",
    params=[
        pytest.param(kind, marks=MARKS.get(kind, pytest.mark.slow)) for kind in (*MAMBA, *CONVS)
    ],
)
def kind(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.fixture(scope="module")
def folder(kind: str, tiny_model: TinyModel) -> Path:
    return tiny_model(kind)


@pytest.fixture(scope="module")
def columns(folder: Path) -> tuple[str, ...]:
    model = load(folder)
    return (ROUTED_EXPERTS,) if model.declared_columns(model.config) else ()


@pytest.fixture(scope="module")
def alone(folder: Path) -> Alone:
    return Alone(make_engine(load(folder), max_num_seqs=1, prefix_caching=False), run)


def cache_gib(folder: Path, tokens: int) -> float:
    model = load(folder)
    columns = model.declared_columns(model.config)
    return (tokens + 16) * paged_token_bytes(model.cache_specs, columns, torch.float32) / 2**30


@pytest.mark.parametrize(
    ("batched", "overlap", "block_size"),
    [(64, True, 8), pytest.param(2048, False, 16, marks=pytest.mark.thorough)],
)
def test_any_schedule(
    alone: Alone,
    folder: Path,
    columns: tuple[str, ...],
    batched: int,
    overlap: bool,
    block_size: int,
) -> None:
    """In chunks, with prefixes that rows share up to a snapshot of the state."""
    rows = requests(seed=1, columns=columns)
    engine = make_engine(
        load(folder), overlap=overlap, max_batched_tokens=batched, block_size=block_size
    )
    alone.check(rows, run(engine, rows))
    assert engine.stats.cached_tokens > 0


@pytest.mark.thorough
def test_rows_that_lose_their_caches(
    alone: Alone, folder: Path, columns: tuple[str, ...], monkeypatch: pytest.MonkeyPatch
) -> None:
    """What they had generated is read again as it was read first, token by token."""
    expect_short_rows(monkeypatch)
    params = RequestParams(max_new_tokens=30, seed=3, logprobs=True, columns=columns)
    rows = [([3 + (i + 2) * j % 125 for j in range(43 + 20 * i)], params) for i in range(4)]
    small: dict[str, Any] = {"max_model_len": 144, "kv_cache_gib": cache_gib(folder, 144)}
    engine = make_engine(load(folder), max_batched_tokens=64, **small)
    alone.check(rows, run(engine, rows))
    assert engine.stats.preemptions > 0


@pytest.mark.thorough
@pytest.mark.parametrize("fold", [1, pytest.param(8, marks=pytest.mark.thorough)])
def test_drafts_that_fall_anywhere_are_taken_back(
    alone: Alone,
    folder: Path,
    columns: tuple[str, ...],
    fold: int,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Whether states are written back in each step or, as on a GPU, behind every eighth token."""
    monkeypatch.setattr(engine_config, "folded_at_once", lambda device: fold)
    rows = requests(seed=20, columns=columns)
    answers = {str(i): alone(row).token_ids for i, row in enumerate(rows)}
    strategy = ForcedStrategy(answers, k=3, seed=3)
    engine = make_engine(
        load(folder), strategy, max_num_seqs=4, kv_cache_gib=cache_gib(folder, 300)
    )
    strategy._engine = engine
    alone.check(rows, run(engine, rows))
    assert all(strategy.held)


@pytest.mark.thorough
def test_ngram_drafts(alone: Alone, folder: Path, columns: tuple[str, ...]) -> None:
    rows = requests(seed=40, count=4, columns=columns)
    strategy = ARSpecStrategy(num_spec_tokens=3, adaptive=False, ngram_min=1)
    engine = make_engine(load(folder), strategy, overlap=True, max_batched_tokens=64)
    alone.check(rows, run(engine, rows))
    assert engine.stats.counts["num_draft_tokens"] > 0


def test_greedy_tokens_log_probabilities_and_experts(
    folder: Path, columns: tuple[str, ...]
) -> None:
    theirs = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    chosen: list[torch.Tensor] = []
    for name, module in theirs.named_modules():
        if columns and name.endswith(_ROUTERS):
            module.register_forward_hook(
                lambda _module, _args, result: chosen.append(ids_of(result))
            )
    rows = requests(seed=7, count=3, temperatures=(0,), columns=columns)
    engine = make_engine(load(folder), max_batched_tokens=64, block_size=4)
    for (prompt, _), output in zip(rows, run(engine, rows), strict=True):
        chosen.clear()
        ids = prompt + output.token_ids
        with torch.inference_mode():
            logits = theirs(torch.tensor([ids]), use_cache=False).logits[0]
        check_greedy(output, logits[len(prompt) - 1 : -1].log_softmax(-1))
        if columns:
            expected = torch.stack(chosen, 1)[:-1].sort(-1).values
            found = torch.from_numpy(output.columns[ROUTED_EXPERTS].astype(int)).sort(-1).values
            assert torch.equal(found, expected)


def test_the_plan_counts_states(folder: Path, kind: str) -> None:
    """A window and a matrix in float32 of each mixer, for each row; of short convolutions a window
    alone."""
    model = load(folder)
    states = [spec for spec in model.cache_specs if hasattr(spec, "state")]
    engine = make_engine(model, max_num_seqs=3)
    if kind in CONVS:
        assert engine.memory.row_states == 4 * len(states) * 4 * 64 * (2 + 2)
        return
    shape = model.config.family.mamba  # type: ignore[attr-defined]
    channels = 2 * shape.num_groups * shape.state_size + shape.num_heads * shape.head_dim
    matrix = shape.num_heads * shape.head_dim * shape.state_size
    own = 4 * ((shape.conv_width - 1) * channels + matrix)
    assert engine.memory.row_states == 4 * len(states) * (
        own + 2 * 4 * (channels + shape.num_heads * (shape.head_dim + 1)
               + shape.num_groups * shape.state_size)
    )  # fmt: skip
