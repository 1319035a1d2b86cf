"""Models with latent attention against transformers."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from batchgen.engine.layers.feed_forward import moe
from batchgen.engine.layers.feed_forward.moe import SparseMoE
from batchgen.engine.layers.mixers import mla
from batchgen.engine.loading.config_file import load_model_config
from batchgen.engine.loading.loader import load_model
from batchgen.engine.models.mla_model import LatentConfig
from batchgen.kernels.attention.metadata import AttentionMetadata
from batchgen.kernels.mla import expanded_triton
from batchgen.kernels.mla.latent_expansion import Expansion
from batchgen.kernels.mla.latent_prepare_triton import prepare_latent_triton
from batchgen.kernels.mla.mla_attention import attend_part
from batchgen.kernels.moe.router.routing_triton import route_triton

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


@pytest.mark.quick(1, thorough=6)
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


@pytest.mark.thorough
@pytest.mark.parametrize(
    "name", ["v3", *(pytest.param(name, marks=pytest.mark.slow) for name in ("v2 lite", "glm"))]
)
def test_a_model_computes_the_same_with_triton(
    name: str,
    tiny_model: TinyModel,
    reference_logits: Callable[..., Tensor],
    run_paged: Callable[..., Tensor],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """An expanded prefill, decode steps, and an absorbed prefill behind them."""
    plans: list[str] = []

    def attend(
        q: Tensor,
        plane: Tensor,
        expansion: Expansion,
        rotated: int,
        parts: Sequence[AttentionMetadata],
        scale: float,
        scales: Tensor | None,
    ) -> Tensor:
        (part,) = parts
        assert scales is None
        found = attend_part(q, plane, expansion, rotated, part, scale)
        plans.extend(type(plan).__name__ for plan, _ in part.plans.values())
        return found

    monkeypatch.setattr(mla, "latent_attention", attend)
    monkeypatch.setattr(mla, "prepare_latent", prepare_latent_triton)
    monkeypatch.setattr(moe, "route", route_triton)
    monkeypatch.setattr(expanded_triton, "_LEAST_TOKENS", 20)
    kind, config = CASES[name]
    folder = tiny_model(kind, **config)
    theirs = reference_logits(folder, IDS[:40])
    ours = run_paged(load_model(folder, device=CPU), IDS[:40], [30, 1, 1, 8])
    assert float((ours - theirs).abs().max() / theirs.abs().max()) < 1e-5
    assert list(dict.fromkeys(plans)) == ["list", "tuple"]


@pytest.mark.parametrize("kind", ["deepseek_v2", "deepseek_v3", "glm4_moe_lite"])
def test_dummy_weights(kind: str, tiny_model: TinyModel, run_paged: Callable[..., Tensor]) -> None:
    model = load_model(tiny_model(kind), device=CPU, load_format="dummy")
    for layer in model.modules():
        if isinstance(layer, SparseMoE) and layer.correction is not None:
            assert not layer.correction.e_score_correction_bias.any()
    model.pack()
    assert run_paged(model, IDS[:20], [20]).isfinite().all()


def test_routers_compute_in_float32(tiny_model: TinyModel) -> None:
    """Near scores would be equal in bfloat16."""
    model = load_model(tiny_model("deepseek_v3"), device=CPU, dtype=torch.bfloat16)
    layers = [module for module in model.modules() if isinstance(module, SparseMoE)]
    assert len(layers) == 2 and model.config.dtype == torch.float32
    for layer in layers:
        assert layer.gate.weight.dtype == torch.float32
        assert layer.experts.gate_up_proj.dtype == torch.bfloat16


def copied(folder: Path, into: Path, **config: Any) -> Path:
    """A copy of a model's configuration with other values in it."""
    values = json.loads((folder / "config.json").read_text()) | config
    (into / "config.json").write_text(json.dumps(values))
    return into


@pytest.mark.parametrize(
    ("kind", "changes", "message"),
    [
        ("deepseek_v2", {"norm_topk_prob": True}, "norm_topk_prob"),
        ("deepseek_v2", {"topk_method": "noaux_tc"}, "topk_method 'noaux_tc'"),
        ("deepseek_v2", {"scoring_func": "sigmoid"}, "scoring_func 'sigmoid'"),
        ("deepseek_v2", {"mlp_bias": True}, "mlp_bias"),
        ("deepseek_v2", GROUPS | {"n_group": 3}, "n_group 3"),
        ("deepseek_v2", {"q_lora_rank": None, "attention_bias": True}, "attention_bias"),
        ("deepseek_v2", {"kv_lora_rank": 0}, "kv_lora_rank is 0"),
        ("deepseek_v2", {"moe_layer_freq": 0}, "moe_layer_freq is 0"),
        ("deepseek_v3", {"scoring_func": "softmax"}, "scoring_func 'softmax'"),
        ("deepseek_v3", {"topk_group": 5}, "topk_group 5"),
        ("deepseek_v3", {"num_experts_per_tok": 5}, "num_experts_per_tok 5"),
        ("glm4_moe_lite", {"mlp_layer_types": ["dense", "x", "sparse"]}, "mlp_layer_types has 'x'"),
    ],
)  # fmt: skip
def test_unsupported_configurations_are_named(
    kind: str, changes: dict[str, Any], message: str, tiny_model: TinyModel, tmp_path: Path
) -> None:
    with pytest.raises(ValueError, match=message):
        load_model_config(copied(tiny_model(kind), tmp_path, **changes))


def test_every_second_layer_may_have_experts(tiny_model: TinyModel, tmp_path: Path) -> None:
    folder = copied(tiny_model("deepseek_v2"), tmp_path, moe_layer_freq=2)
    assert load_model_config(folder).family_as(LatentConfig).moe_layers == (2,)


def test_yarn_lengthens_the_scores(tiny_model: TinyModel) -> None:
    family = load_model_config(tiny_model("deepseek_v3", **YARN)).family_as(LatentConfig)
    length = 0.1 * 1.2 * 1.3862943611198906 + 1
    assert family.score_scale == pytest.approx(20**-0.5 * length**2)
    plain = load_model_config(tiny_model("deepseek_v3")).family_as(LatentConfig)
    assert plain.score_scale == pytest.approx(20**-0.5)
