"""Writes the tiny models of the tests as GGUF files, with the `gguf` package."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import torch
from gguf import GGMLQuantizationType as Kind
from transformers import AutoModelForCausalLM

NAMES = {
    "self_attn.q_proj": "attn_q", "self_attn.k_proj": "attn_k", "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output", "self_attn.q_norm": "attn_q_norm",
    "self_attn.k_norm": "attn_k_norm", "mlp.gate_proj": "ffn_gate", "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down", "input_layernorm": "attn_norm",
    "post_attention_layernorm": "ffn_norm", "model.layers.": "blk.",
    "model.embed_tokens": "token_embd", "model.norm": "output_norm", "lm_head": "output",
}  # fmt: skip


def permute(weight: np.ndarray[Any, Any], heads: int) -> np.ndarray[Any, Any]:
    """As the converter stores q and k of llama: rotated pairs side by side."""
    halves = weight.reshape(heads, 2, -1, *weight.shape[1:])
    return halves.swapaxes(1, 2).reshape(weight.shape)


def write_gguf(
    folder: Path,
    path: Path,
    *,
    kind: Kind = Kind.F32,
    metadata: dict[str, Any] | None = None,
    skip: str = "",
    rope_factors: list[float] | None = None,
) -> Path:
    """The model of a folder as GGUF; metadata keys (without the architecture) to add."""
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    config = model.config
    writer = gguf.GGUFWriter(path, config.model_type)
    writer.add_block_count(config.num_hidden_layers)
    writer.add_context_length(config.max_position_embeddings)
    writer.add_embedding_length(config.hidden_size)
    writer.add_feed_forward_length(config.intermediate_size)
    writer.add_head_count(config.num_attention_heads)
    writer.add_head_count_kv(config.num_key_value_heads)
    writer.add_key_length(config.head_dim)
    writer.add_value_length(config.head_dim)
    writer.add_layer_norm_rms_eps(config.rms_norm_eps)
    writer.add_rope_freq_base(config.rope_parameters["rope_theta"])
    for key, value in (metadata or {}).items():
        add: dict[type, Callable[..., None]] = {
            str: writer.add_string, float: writer.add_float32, int: writer.add_uint32
        }  # fmt: skip
        add[type(value)](f"{config.model_type}.{key}", value)
    tied = config.tie_word_embeddings
    for name, tensor in model.state_dict().items():
        if (tied and name == "lm_head.weight") or (skip and skip in name):
            continue
        data = tensor.numpy()
        if config.model_type == "llama":
            for part, heads in (
                ("q_proj", config.num_attention_heads), ("k_proj", config.num_key_value_heads),
            ):  # fmt: skip
                data = permute(data, heads) if part in name else data
        for ours, theirs in NAMES.items():
            name = name.replace(ours, theirs)
        if kind != Kind.F32 and data.ndim == 2:
            writer.add_tensor(name, gguf.quants.quantize(data, kind), raw_dtype=kind)
        else:
            writer.add_tensor(name, np.ascontiguousarray(data))
    if rope_factors is not None:
        writer.add_tensor("rope_freqs.weight", np.array(rope_factors, np.float32))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path
