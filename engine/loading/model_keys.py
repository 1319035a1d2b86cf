"""Checks that the engine knows every key of a config.json that changes a model.

Each key is either honoured by the family's `config_from_hf`, or has no effect here (`INERT`), or is
refused unless it has the only value that the engine implements (`FIXED`).
tests/engine/loading/test_model_keys.py checks that each key that the modelling files of the tested
transformers read is one of the three.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from transformers import PretrainedConfig

_TRAINING = "of training alone"
_TOWERS = "of towers, which are read from their own part or not loaded"
INERT: Mapping[str, str] = {
    **dict.fromkeys(
        [
            *("attention_dropout", "resid_pdrop", "residual_dropout", "embd_pdrop"),
            *("initializer_range", "router_jitter_noise", "router_aux_loss_coef"),
            "z_loss_coefficient",
        ],
        _TRAINING,
    ),
    **dict.fromkeys(
        [
            *("vision_config", "audio_config", "image_token_id", "image_token_index"),
            "vision_token_id",
            *("video_token_id", "audio_token_id", "mm_tokens_per_image", "vision_feature_layer"),
            *("multimodal_projector_bias", "projector_hidden_act", "spatial_merge_size"),
        ],
        _TOWERS,
    ),
    **dict.fromkeys(
        ["mamba_chunk_size", "chunk_size"], "how a scan is cut, which changes no value"
    ),
    **dict.fromkeys(
        ["mamba_expand", "expand"], "the number of Mamba heads and their size say as much"
    ),
    "num_logits_to_keep": "which logits a forward returns",
    **dict.fromkeys(
        ["output_router_logits", "output_attentions", "output_hidden_states", "return_dict"],
        "what a forward returns besides logits",
    ),
    "pad_token_id": "rows are not padded",
    "use_cache": "there is always a cache",
    "text_config": "the decoder's part, whose keys count by themselves",
    "full_attention_interval": "layer_types has what it says",
    "mamba_ssm_dtype": "states of recurrent layers are always in float32",
}
"""Keys that modelling files read and that have no effect here, each with the reason."""
_NO_WINDOW = "layer_types says which layers have a window, and those are refused"
_NO_EXPERTS = "read where enable_moe_block is true"
INERT_OF: Mapping[str, Mapping[str, str]] = {
    **{
        kind: {"sliding_window": _NO_WINDOW, "use_sliding_window": _NO_WINDOW}
        for kind in ("dots1", "qwen2", "qwen2_moe", "qwen3", "sdar", "smollm3")
    },
    "deepseek_v2": dict.fromkeys(["n_group", "topk_group"], "read where topk_method has groups"),
    **{
        kind: {
            "num_experts": _NO_EXPERTS,
            "top_k_experts": _NO_EXPERTS,
            "moe_intermediate_size": _NO_EXPERTS,
            "vocab_size_per_layer_input": "read where hidden_size_per_layer_input is over 0",
            "kv_sharing_modes": "what num_kv_shared_layers comes to",
        }
        for kind in ("gemma4", "gemma4_text")
    },
    "diffusion_gemma": dict.fromkeys(
        ["output_proj_dims", "standardize", "use_clipped_linears"], _TOWERS
    ),
    "qwen2_5_vl": {"sliding_window": _NO_WINDOW, "use_sliding_window": _NO_WINDOW},
    "qwen3_vl": {"layer_types": "kept, and all layers have the same mask"},
    "qwen3_vl_moe": {"layer_types": "kept, and all layers have the same mask"},
    **{
        kind: {"sliding_window_pattern": "layer_types has what it says"}
        for kind in ("exaone4", "exaone_moe")
    },
    "falcon_h1": {
        "mamba_d_ssm": "the number of Mamba heads and their size say as much",
        "mamba_norm_before_gate": "read where mamba_rms_norm is true",
        "layers_block_type": "all layers are of one kind",
    },
    "nemotron_h": {
        **dict.fromkeys(("time_step_min", "time_step_max", "time_step_floor"), _TRAINING),
        "rescale_prenorm_residual": _TRAINING,
        "use_mamba_kernels": "which code computes it",
    },
    "phi3": {"original_max_position_embeddings": "rope_parameters has it, too"},
}
"""Further keys without effect, by the kind of model, each with the reason."""
FIXED: Mapping[str, tuple[object, ...]] = {
    "is_causal": (None, True),
    "per_layer_config": (None, {}),
    "mtp_per_layer_config": (None, {}),
    "attention_chunk_size": (None,),
    "is_encoder_decoder": (None, False),
    "mtp_use_dedicated_embeddings": (None, False),
    "add_cross_attention": (None, False),
}
"""Keys of any family that change the model, with the values that the engine supports."""
_HONOURED = {  # FIXED keys, by kinds of models
    "per_layer_config": ("gemma4", "gemma4_text", "diffusion_gemma"),
    "attention_chunk_size": ("llama4", "llama4_text"),
}
_OF_FILES = {
    *("architectures", "auto_map", "dtype", "torch_dtype", "transformers_version", "model_type"),
    *("rope_theta", "rope_scaling", "rope_parameters", "partial_rotary_factor", "tokenizer_class"),
    *("quantization_config", "attn_output_gate", "mtp_num_hidden_layers", "num_mtp_layers"),
    *("num_nextn_predict_layers", "moe_layer_freq", "first_k_dense_replace", "num_experts"),
    *("num_local_experts", "head_dim", "tie_word_embeddings"),
    *("bos_token_id", "eos_token_id", "pad_token_id", "id2label", "label2id"),
}
"""Keys that families read although no class of transformers declares them, and keys of all
files."""


def check_model_keys(file: Path, values: Mapping[str, Any], model_type: str) -> None:
    """Raise ValueError, naming the key, if a config.json or its text_config has a key that changes
    the model in a way that the engine does not support."""
    for prefix, part in _parts(values):
        for key, allowed in FIXED.items():
            if model_type in _HONOURED.get(key, ()) or (value := part.get(key)) in allowed:
                continue
            raise ValueError(
                f"{file}: {prefix}{key} is {value!r:.60}, but the engine supports only "
                f"{' or '.join(map(repr, allowed))}: the key changes the model"
            )


def unknown_keys(values: Mapping[str, Any], kind: type[PretrainedConfig]) -> list[str]:
    """Return the keys of a config.json, and of its text_config, that neither transformers' class of
    the model nor a family of the engine knows."""
    unknown = []
    for prefix, part in _parts(values):
        # The text_config may name another class.
        known = type(kind.from_dict(dict(values)).text_config) if prefix else kind
        names = {*known().to_dict(), *known.attribute_map, *_OF_FILES, *INERT, *FIXED}
        if "text_config" in kind.sub_configs and not values.get("text_config"):
            names |= set(known().text_config.to_dict())
        unknown += [prefix + key for key in part if key not in names and not key.startswith("_")]
    return unknown


def _parts(values: Mapping[str, Any]) -> list[tuple[str, Mapping[str, Any]]]:
    text = values.get("text_config")
    return [("", values), *([("text_config.", text)] if isinstance(text, dict) else [])]
