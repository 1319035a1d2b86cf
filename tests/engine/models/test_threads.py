"""A row has the same bits beside others as alone with 1, 2 and 3 threads, in every family.

Prefills are large enough for PyTorch to divide the values of a layer among threads, at places
inside rows, and widths are such that vectors do not divide what 16 rows hold: products on a CPU
have multiples of 16 rows, so even widths, or fewer than 16 rows, would hide values left over.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from batchgen.engine.interface.engine_config import EngineConfig
from batchgen.engine.llm_engine import LLMEngine
from batchgen.engine.loading.loader import load_model
from batchgen.engine.sampling.sampling_params import RequestParams
from batchgen.engine.strategy import Strategy
from batchgen.strategies.ar.strategy import ARStrategy
from batchgen.strategies.canvas.strategy import CanvasStrategy
from batchgen.strategies.dllm.strategy import DLLMStrategy
from tests.support.engine.engine_rows import Pictured, Request, run
from tests.support.engine.families import ARCHITECTURES, CANVAS, DIFFUSION
from tests.support.engine.vision_models import KINDS as SEEING
from tests.support.engine.vision_models import picture_for, prompt, vision_folder

ODD: dict[str, dict[str, Any]] = {
    "deepseek_v3": {"n_routed_experts": 7, "n_group": 1, "topk_group": 1},
    "glm4_moe": {"n_routed_experts": 7, "n_group": 1, "topk_group": 1},
    "glm4_moe_lite": {"n_routed_experts": 7, "n_group": 1, "topk_group": 1},
    "minimax_m2": {"num_local_experts": 7},
}
"""Numbers of experts of the families whose routers have sigmoids."""
FAST = {
    ("minimax_m2", 3), ("qwen3_vl", 1), ("qwen3_5_text", 2), ("sdar", 3), ("diffusion_gemma", 2),
}  # fmt: skip
"""One of each mechanism: sigmoids of a router, a vision tower, recurrence, both diffusions."""


@pytest.fixture
def threads(request: pytest.FixtureRequest) -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(request.param)
    yield
    torch.set_num_threads(before)


def rows_of(kind: str) -> list[Request | Pictured]:
    """Sixteen rows of more than 700 tokens in all; with images if the model sees."""
    rng = random.Random(len(kind))
    rows: list[Request | Pictured] = []
    for i in range(16):
        params = RequestParams(temperature=0.8 * (i % 2), max_new_tokens=4, seed=i, logprobs=True)
        ids = [rng.randrange(3, 120) for _ in range(rng.randrange(30, 80))]
        if kind in SEEING:
            image = picture_for(kind, i, rng.randint(1, 7), rng.randint(1, 7))
            rows.append((prompt(ids[:5], image, ids[5:]), params, [image]))
        else:
            rows.append((ids, params))
    return rows


def engine_of(kind: str, folder: Path, **config: Any) -> LLMEngine:
    model = load_model(
        folder, device=torch.device("cpu"), dtype=torch.float32, vision=kind in SEEING
    )
    strategy: Strategy = DLLMStrategy(4) if kind in DIFFUSION else ARStrategy()
    if kind in CANVAS:
        strategy = CanvasStrategy(max_denoising_steps=3)
    options: dict[str, Any] = {"max_model_len": 256, "kv_cache_gib": 0.02, "image_tokens": 256}
    engine = LLMEngine(model, None, (), strategy, EngineConfig(**options | config))
    if model.batch_dependence is not None:
        pytest.skip(model.batch_dependence)
    return engine


@pytest.mark.quick(0, thorough=1)
@pytest.mark.parametrize(
    ("kind", "threads"),
    [
        pytest.param(kind, n, marks=[pytest.mark.slow] * ((kind, n) not in FAST))
        for kind in ARCHITECTURES
        for n in (1, 2, 3)
    ],
    indirect=["threads"],
)
@pytest.mark.usefixtures("threads")
def test_rows_beside_others_have_the_bits_of_rows_alone(
    kind: str, tiny_model: Callable[..., Path]
) -> None:
    folder = vision_folder(kind) if kind in SEEING else tiny_model(kind, **ODD.get(kind, {}))
    rows = rows_of(kind)
    single = engine_of(kind, folder, max_num_seqs=1, prefix_caching=False)
    together = engine_of(kind, folder, max_num_seqs=16, max_batched_tokens=2048)
    for row, output in zip(rows, run(together, rows), strict=True):
        (alone,) = run(single, [row])
        assert output.token_ids == alone.token_ids
        for name, values in alone.columns.items():
            np.testing.assert_array_equal(output.columns[name], values)
