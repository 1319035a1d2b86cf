"""Rows of each family of diffusion models: the same bits however they are scheduled.

What a row says alone, with its prompt read in one forward, is held against other batches, chunks of
prompts, prefixes that rows share, and rows that lose their caches.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from batchgen.engine.interface.engine_config import EngineConfig
from batchgen.engine.llm_engine import LLMEngine
from batchgen.engine.loading.loader import load_model
from batchgen.engine.models.moe_model import ROUTED_EXPERTS
from batchgen.engine.sampling.sampling_params import RequestParams
from batchgen.engine.strategy import Strategy
from batchgen.strategies.canvas.renoising import Renoising
from batchgen.strategies.canvas.strategy import CanvasStrategy
from batchgen.strategies.dllm.rules.entropy_bound import EntropyBound
from batchgen.strategies.dllm.rules.joint_threshold import JointThreshold
from batchgen.strategies.dllm.rules.low_confidence_dynamic import LowConfidenceDynamic
from batchgen.strategies.dllm.rules.low_confidence_static import LowConfidenceStatic
from batchgen.strategies.dllm.rules.rule import Rule
from batchgen.strategies.dllm.strategy import DLLMStrategy
from tests.engine.models import test_family_rows
from tests.support.engine.alone_rows import Alone
from tests.support.engine.engine_rows import Request, expect_short_rows, run

TinyModel = Callable[..., Path]
LENGTH = 8
KINDS = ("llada2_moe", "fast_dllm_qwen", "diffusion_gemma", "sdar", "sdar_moe")
RULES: tuple[Rule, ...] = (
    LowConfidenceDynamic(confidence_threshold=0.05),
    EntropyBound(entropy_bound=4.0),
    LowConfidenceStatic(denoising_steps=3),
    JointThreshold(confidence_threshold=0.05, edit_threshold=0.1),
)
SUB_BLOCKS = {"fast_dllm_qwen": 4}
CANVASES = (
    Renoising(max_denoising_steps=5, entropy_bound=4.0, stop_entropy=4.0),
    Renoising(max_denoising_steps=3, start_temperature=1.0, end_temperature=0.5),
    Renoising(max_denoising_steps=1, entropy_bound=1.0),
)
"""Options of rows of models that denoise canvases."""
EXPERTS = ("llada2_moe", "diffusion_gemma", "sdar_moe")


@pytest.fixture(
    scope="module",
    params=[*KINDS[:3], *(pytest.param(kind, marks=pytest.mark.slow) for kind in KINDS[3:])],
)
def kind(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.fixture(scope="module")
def engine_of(kind: str, tiny_model: TinyModel) -> Callable[..., LLMEngine]:
    """Makes engines of one model, with the experts of tokens as a column if it has some."""
    device = torch.device("cpu")
    model = load_model(tiny_model(kind), device=device, dtype=torch.float32)

    def make(**config: Any) -> LLMEngine:
        strategy: Strategy = DLLMStrategy(LENGTH, sub_block_length=SUB_BLOCKS.get(kind))
        if kind == "diffusion_gemma":
            strategy = CanvasStrategy()
        options: dict[str, Any] = {"max_model_len": 256, "kv_cache_gib": 0.01, "max_num_seqs": 5}
        columns = [ROUTED_EXPERTS] if kind in EXPERTS else []
        settings = EngineConfig(**options | config)
        return LLMEngine(model, None, (), strategy, settings, context_columns=columns)

    return make


@pytest.fixture(scope="module")
def alone(engine_of: Callable[..., LLMEngine]) -> Alone:
    return Alone(engine_of(max_num_seqs=1, prefix_caching=False), run)


def of_every_rule(kind: str, rows: list[Request]) -> list[Request]:
    """These rows, with the rules of the family in turn."""
    rules: Sequence[Rule | Renoising] = RULES[:3] if kind in SUB_BLOCKS else RULES
    if kind == "diffusion_gemma":
        rules = CANVASES
    columns = ("step_map", "entropy", *[ROUTED_EXPERTS] * (kind in EXPERTS))
    return [
        (prompt, replace(params, columns=columns, decoding=rules[i % len(rules)]))
        for i, (prompt, params) in enumerate(rows)
    ]


@pytest.mark.quick(1, thorough=4)
@pytest.mark.parametrize(
    ("batched", "overlap", "block_size"), [(48, True, 8), (2048, False, 16), (8, True, 8)]
)
def test_any_schedule(
    kind: str,
    alone: Alone,
    engine_of: Callable[..., LLMEngine],
    batched: int,
    overlap: bool,
    block_size: int,
) -> None:
    """Chunks of prompts, batches, and prefixes that some rows share."""
    rows = of_every_rule(kind, test_family_rows.requests(seed=1))
    engine = engine_of(overlap=overlap, max_batched_tokens=batched, block_size=block_size)
    alone.check(rows, run(engine, rows))
    assert engine.stats.cached_tokens > 0


@pytest.mark.quick(0, thorough=2)
def test_rows_that_lose_their_caches(
    kind: str,
    alone: Alone,
    engine_of: Callable[..., LLMEngine],
    monkeypatch: pytest.MonkeyPatch,
    tiny_model: TinyModel,
) -> None:
    """What they had generated is read again as part of their prompt."""
    expect_short_rows(monkeypatch)
    params = RequestParams(max_new_tokens=40, seed=3, temperature=0.8, logprobs=True)
    rows = of_every_rule(
        kind, [([3 + (i + 2) * j % 125 for j in range(20 + 9 * i)], params) for i in range(6)]
    )
    gib = test_family_rows.cache_gib(tiny_model(kind), 136)
    engine = engine_of(max_batched_tokens=32, max_model_len=128, kv_cache_gib=gib)
    alone.check(rows, run(engine, rows))
    assert engine.stats.preemptions
