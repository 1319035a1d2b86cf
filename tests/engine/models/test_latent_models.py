"""Models with latent attention against transformers."""

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
IDS = [(7 * i * i + 3 * i) % 128 for i in range(150)]
YARN: dict[str, Any] = {
    "rope_parameters": {
        "rope_type": "yarn", "rope_theta": 1000.0, "factor": 4.0, "beta_fast": 32, "beta_slow": 1,
        "original_max_position_embeddings": 64, "mscale": 0.7, "mscale_all_dim": 1.2,
    }
}  # fmt: skip
GROUPS = {"topk_method": "group_limited_greedy", "n_group": 4, "topk_group": 2}
CASES: dict[str, tuple[str, dict[str, Any]]] = {
    "v2": ("deepseek_v2", {}),
    "v2 lite": ("deepseek_v2", {"q_lora_rank": None} | YARN),
    "v2 groups": ("deepseek_v2", GROUPS),
    "v2 biases": ("deepseek_v2", {"attention_bias": True}),
    "v2 fused experts": ("deepseek_v2", {"split_experts": False}),
    "v2 all dense": ("deepseek_v2", {"first_k_dense_replace": 3}),
    "v3": ("deepseek_v3", {}),
    "v3 yarn": ("deepseek_v3", YARN),
    "v3 without q_lora": ("deepseek_v3", {"q_lora_rank": None, "n_group": 1, "topk_group": 1}),
    "v3 halves": ("deepseek_v3", {"rope_interleave": False}),
    "v3 weights as they are": ("deepseek_v3", {"norm_topk_prob": False}),
    "glm": ("glm4_moe_lite", {}),
    "glm layers": ("glm4_moe_lite", {"mlp_layer_types": ["sparse", "dense", "sparse"]}),
}


@pytest.mark.parametrize("name", CASES)
def test_logits_equal_transformers(
    name: str,
    tiny_model: TinyModel,
    reference_logits: Callable[..., Tensor],
    run_paged: Callable[..., Tensor],
) -> None:
    kind, config = CASES[name]
    folder = tiny_model(kind, **config)
    model = load_model(folder, device=CPU)
    theirs = reference_logits(folder, IDS)
    plain = run_paged(model, IDS, [64, 1, 85])
    assert float((plain - theirs).abs().max() / theirs.abs().max()) < 1e-5
    model.pack()
    packed = run_paged(model, IDS, [64, 1, 85])
    assert float((packed - theirs).abs().max() / theirs.abs().max()) < 1e-5
