"""Qwen3.5 and Qwen3-Next against transformers."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from batchgen.engine.loading.loader import load_model

TinyModel = Callable[..., Path]
CPU = torch.device("cpu")
IDS = [(7 * i * i + 3 * i) % 128 for i in range(200)]
CONFIGS: dict[str, dict[str, Any]] = {
    "default": {},
    "tied": {"tie_word_embeddings": True},
}
KINDS = ["qwen3_next", "qwen3_5", "qwen3_5_moe", "qwen3_5_text", "qwen3_5_moe_text"]


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("name", CONFIGS)
def test_logits_equal_transformers(
    kind: str,
    name: str,
    tiny_model: TinyModel,
    reference_logits: Callable[..., Tensor],
    run_paged: Callable[..., Tensor],
) -> None:
    folder = tiny_model(kind, **CONFIGS[name])
    logits = run_paged(load_model(folder, device=CPU), IDS, [64, 128, 8])
    theirs = reference_logits(folder, IDS)
    assert float((logits - theirs).abs().max() / theirs.abs().max()) < 1e-5
