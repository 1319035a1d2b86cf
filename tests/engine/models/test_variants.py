"""Families of common layers in other places against transformers, and what they refuse."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from edited_models import edit_config
from safetensors import safe_open
from torch import Tensor

from batchgen.engine.layers.feed_forward.moe import SparseMoE
from batchgen.engine.loading.config_file import load_config
from batchgen.engine.loading.loader import load_model
from batchgen.engine.models.sparse.moe_model import MoEConfig
from batchgen.engine.models.transformer.dense import DenseConfig

TinyModel = Callable[..., Path]
CPU = torch.device("cpu")
IDS = [(7 * i * i + 3 * i) % 128 for i in range(200)]
DEFAULT = {"rope_type": "default", "rope_theta": 1000.0}
YARN: dict[str, Any] = {
    "rope_type": "yarn", "rope_theta": 1000.0, "factor": 4.0, "attention_factor": 1.2,
    "original_max_position_embeddings": 64,
}  # fmt: skip
ALL_FULL = {"layer_types": ["full_attention"] * 3}
CASES: dict[str, tuple[str, dict[str, Any]]] = {
    "glm": ("glm4_moe", {}),
    "glm norms": ("glm4_moe", {"use_qk_norm": True, "attention_bias": False}),
    "glm plain": ("glm4_moe", {"n_group": 1, "topk_group": 1, "norm_topk_prob": False}),
    "glm fused experts": ("glm4_moe", {"split_experts": False}),
    "glm all dense": ("glm4_moe", {"first_k_dense_replace": 3}),
    "minimax": ("minimax_m2", {}),
    "minimax one key head": ("minimax_m2", {"num_key_value_heads": 1}),
    "minimax fused experts": ("minimax_m2", {"split_experts": False}),
    "ministral": ("ministral3", {}),
    "ministral with windows": ("ministral3", {"sliding_window": 9}),
    "ministral tied": ("ministral3", {"tie_word_embeddings": True}),
    "ministral with a tower": ("mistral3", {}),
    "olmo": ("olmo3", {}),
    "olmo yarn": ("olmo3", {"rope_parameters": {
        "full_attention": YARN, "sliding_attention": DEFAULT}}),
    "olmo biases": ("olmo3", {"attention_bias": True, "num_key_value_heads": 4}),
    "olmo as long as its window": ("olmo3", {"sliding_window": len(IDS)}),
    "olmo sees itself": ("olmo3", {"sliding_window": 1}),
    "olmo without windows": ("olmo3", ALL_FULL | {"sliding_window": 7}),
    "gemma": ("gemma3_text", {}),
    "gemma with a tower": ("gemma3", {}),
    "gemma untied": ("gemma3_text", {"tie_word_embeddings": False, "attention_bias": True}),
    "gemma without a cap": ("gemma3_text", {"final_logit_softcapping": None}),
    "gemma as long as 4b": ("gemma3_text", {"rope_parameters": {
        "full_attention": DEFAULT | {"rope_type": "linear", "factor": 8.0},
        "sliding_attention": DEFAULT}}),
    "gemma 4": ("gemma4_text", {}),
    "gemma 4 with a tower": ("gemma4", {}),
    "gemma 4 with values": ("gemma4_text", {"attention_k_eq_v": False}),
    "gemma 4 turns whole heads": ("gemma4_text", {"rope_parameters": {
        "full_attention": DEFAULT, "sliding_attention": DEFAULT}}),
    "gpt-oss": ("gpt_oss", {}),
    "gpt-oss without biases": ("gpt_oss", {"attention_bias": False, "num_key_value_heads": 4}),
    "gpt-oss wide": ("gpt_oss", {
        "intermediate_size": 40, "swiglu_limit": 0.4, "swiglu_alpha": 1.0}),
    "gpt-oss without windows": ("gpt_oss", ALL_FULL | {"num_experts_per_tok": 8}),
    "smollm": ("smollm3", {}),
    "smollm biases": ("smollm3", {"attention_bias": True, "mlp_bias": True}),
    "smollm turns nowhere": ("smollm3", {"no_rope_layers": [0, 0, 0]}),
    "smollm turns everywhere": ("smollm3", {"no_rope_layers": None}),
}  # fmt: skip


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
    for packed in (False, True):
        if packed:
            model.pack()
        ours = run_paged(model, IDS, [64, 100, 1, 35])
        assert float((ours - theirs).abs().max() / theirs.abs().max()) < 1e-5


@pytest.mark.parametrize(
    "kind", ["glm4_moe", "minimax_m2", "mistral3", "olmo3", "smollm3", "gemma3", "gpt_oss"]
)
def test_dummy_weights(kind: str, tiny_model: TinyModel, run_paged: Callable[..., Tensor]) -> None:
    model = load_model(tiny_model(kind), device=CPU, load_format="dummy")
    model.pack()
    assert run_paged(model, IDS[:20], [20]).isfinite().all()


def test_the_published_names_of_minimax(tiny_model: TinyModel) -> None:
    with safe_open(tiny_model("minimax_m2") / "model.safetensors", "pt") as file:
        names = set(file.keys())
    at = "model.layers.2.block_sparse_moe"
    assert {f"{at}.e_score_correction_bias", f"{at}.gate.weight"} < names
    assert {f"{at}.experts.7.{part}.weight" for part in ("w1", "w2", "w3")} < names


def test_the_published_configuration_of_minimax(tiny_model: TinyModel, tmp_path: Path) -> None:
    """Without rope_parameters, and with keys that transformers does not know."""
    published = {
        "rope_parameters": None, "rope_theta": 5000000, "rotary_dim": 8, "scoring_func": "sigmoid",
        "use_routing_bias": True, "use_qk_norm": True, "qk_norm_type": "per_layer", "use_mtp": True,
        "shared_intermediate_size": 0, "attn_type_list": [1, 1, 1], "num_mtp_modules": 3,
        "quantization_config": {
            "quant_method": "fp8", "fmt": "float8_e4m3fn", "activation_scheme": "dynamic",
            "weight_block_size": [128, 128],
            "modules_to_not_convert": ["gate", "e_score_correction_bias", "lm_head"],
        },
    }  # fmt: skip
    config = load_config(edit_config(tiny_model("minimax_m2"), tmp_path / "m", **published))
    family = config.family_as(MoEConfig)
    assert (family.rotary_dim, family.rope.rope_theta) == (8, 5000000)
    assert config.form is not None and config.heads == ()
    assert config.form.excludes("model.layers.0.mlp.gate")
    assert not config.form.excludes("model.layers.0.mlp.experts.0.gate_proj")


def test_a_router_in_float32_stays_so(tiny_model: TinyModel) -> None:
    model = load_model(tiny_model("minimax_m2"), device=CPU, dtype=torch.bfloat16)
    layers = [module for module in model.modules() if isinstance(module, SparseMoE)]
    assert len(layers) == 3
    assert all(layer.gate.weight.dtype == torch.float32 for layer in layers)


@pytest.mark.parametrize(
    ("kind", "changes", "message"),
    [
        ("glm4_moe", {"topk_group": 5}, "topk_group 5"),
        ("glm4_moe", {"hidden_act": "gelu"}, "hidden_act 'gelu'"),
        ("minimax_m2", {"scoring_func": "softmax"}, "scoring_func 'softmax' is not supported"),
        ("minimax_m2", {"use_routing_bias": False}, "use_routing_bias False"),
        ("minimax_m2", {"use_qk_norm": False}, "use_qk_norm False"),
        ("minimax_m2", {"qk_norm_type": "per_head"}, "qk_norm_type 'per_head'"),
        ("minimax_m2", {"shared_intermediate_size": 8}, "shared_intermediate_size 8"),
        ("minimax_m2", {"attn_type_list": [1, 0, 1]}, r"attn_type_list is \[1, 0, 1\]"),
        ("minimax_m2", {"sliding_window": 8}, "sliding_window 8"),
        ("ministral3", {"sliding_window": -8}, "sliding_window is -8"),
        ("ministral3", {"rope_parameters": YARN | {"llama_4_scaling_beta": "x"}}, "llama_4"),
        ("mistral3", {"text_config": {"model_type": "mistral"}}, "model_type is 'mistral'"),
        ("olmo3", {"layer_types": ["full_attention"]}, "layer"),
        ("olmo3", {"sliding_window": 0}, "sliding_window is 0"),
        ("gemma3_text", {"attn_logit_softcapping": 50.0}, "attn_logit_softcapping"),
        ("gemma3_text", {"final_logit_softcapping": -1.0}, "final_logit_softcapping is -1.0"),
        ("gemma3_text", {"hidden_activation": "silu"}, "hidden_activation 'silu'"),
        ("gemma3_text", {"use_bidirectional_attention": True}, "use_bidirectional_attention True"),
        ("gemma3_text", {"query_pre_attn_scalar": 0}, "query_pre_attn_scalar is 0"),
        ("gemma3_text", {"sliding_window": 0}, "sliding_window is 0"),
        ("gemma4_text", {"enable_moe_block": True}, "enable_moe_block is True: a mixture"),
        ("gemma4_text", {"hidden_size_per_layer_input": 8}, "hidden_size_per_layer_input is 8"),
        ("gemma4_text", {"num_kv_shared_layers": 1}, "num_kv_shared_layers is 1"),
        ("smollm3", {"no_rope_layers": [1]}, r"no_rope_layers is \[1\]"),
        ("smollm3", {"no_rope_layers": [1, 2, 0]}, r"no_rope_layers is \[1, 2, 0\]"),
        ("smollm3", {"layer_types": ["sliding_attention"] * 3}, "sliding-window attention"),
    ],
)  # fmt: skip
def test_unsupported_configurations_are_named(
    kind: str, changes: dict[str, Any], message: str, tiny_model: TinyModel, tmp_path: Path
) -> None:
    with pytest.raises(ValueError, match=message):
        load_config(edit_config(tiny_model(kind), tmp_path / "m", **changes))


def test_what_the_families_declare(tiny_model: TinyModel) -> None:
    olmo = load_config(tiny_model("olmo3")).family_as(DenseConfig)
    assert (olmo.norm_places, olmo.qk_norm, len(olmo.layer_ropes)) == ("after", "all heads", 3)
    assert olmo.layer_windows == (24, None, 24)
    no_window = load_config(tiny_model("olmo3", **ALL_FULL | {"sliding_window": 7}))
    assert no_window.family_as(DenseConfig).layer_windows == ()
    smol = load_config(tiny_model("smollm3")).family_as(DenseConfig)
    assert [rope is None for rope in smol.layer_ropes] == [False, True, False]
    large = load_config(tiny_model("glm4_moe", use_qk_norm=True)).family_as(MoEConfig)
    air = load_config(tiny_model("glm4_moe")).family_as(MoEConfig)
    assert (large.qk_norm, air.qk_norm, air.rotary_dim, air.shared_size) == ("head", None, 8, 64)
    ministral = load_config(tiny_model("mistral3")).family_as(DenseConfig)
    assert ministral.query_scale is not None and ministral.query_scale.original == 32
