"""Translates names and conventions of GGUF files to those of transformers' checkpoints, such as
`blk.0.attn_q.weight` to `model.layers.0.self_attn.q_proj.weight`.

The loader calls `gguf_config` and `gguf_weights`.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import TypeVar

import torch
from torch import Tensor

from batchgen.engine.layers.rotary import (
    DefaultRope,
    FrequencyFactorsRope,
    LinearRope,
    YarnRope,
)
from batchgen.engine.loading.gguf.gguf_file import GGUFFile
from batchgen.engine.models.causal_lm import CausalLM
from batchgen.engine.models.dense import DenseConfig, DenseForCausalLM
from batchgen.engine.models.model_config import ModelConfig, check_positive, extended_positions
from batchgen.engine.models.model_registry import gguf_model_class

_TOP = {
    "token_embd": "model.embed_tokens",
    "output_norm": "model.norm",
    "output": "lm_head",
}
# GGUF files call a decoder layer a block.
_BLOCK = {
    "attn_norm": "input_layernorm",
    "ffn_norm": "post_attention_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "attn_q_norm": "self_attn.q_norm",
    "attn_k_norm": "self_attn.k_norm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}
_ROPE_FACTORS = "rope_freqs.weight"

T = TypeVar("T")


def gguf_config(file: GGUFFile) -> ModelConfig:
    """Make the configuration that the file's metadata and tensors describe. Raises ValueError,
    naming the file, if the architecture or its rotary embedding is not supported, or if a key is
    missing or has a wrong value."""
    prefix = file.metadata.get("general.architecture")
    if not isinstance(prefix, str):
        raise ValueError(f"{file.path}: metadata general.architecture is missing or not a string")
    model = gguf_model_class(prefix, file.path)
    assert issubclass(model, DenseForCausalLM), "GGUF files of other families are not read yet"
    try:
        return _config(file, prefix, model)
    except ValueError as error:
        raise ValueError(f"{file.path}: {error}") from error


def _config(file: GGUFFile, prefix: str, model: type[DenseForCausalLM]) -> ModelConfig:
    """Make the configuration of a model whose metadata keys begin with `prefix`; see
    `gguf_config`."""
    num_heads = _get(file, f"{prefix}.attention.head_count", int)
    check_positive(num_heads=num_heads)
    hidden_size = _get(file, f"{prefix}.embedding_length", int)
    # These defaults are part of the GGUF format.
    head_dim = _get(file, f"{prefix}.attention.key_length", int, hidden_size // num_heads)
    if _get(file, f"{prefix}.attention.value_length", int, head_dim) != head_dim:
        raise ValueError("keys and values of different sizes are not supported")
    if _get(file, f"{prefix}.rope.dimension_count", int, head_dim) != head_dim:
        raise ValueError("partial rotary embedding is not supported")
    if "token_embd.weight" not in file.tensors:
        raise ValueError("tensor token_embd.weight is missing")
    rope = _rope(file, prefix)
    context_length = _get(file, f"{prefix}.context_length", int)
    family = DenseConfig(
        num_heads=num_heads,
        num_kv_heads=_get(file, f"{prefix}.attention.head_count_kv", int, num_heads),
        head_dim=head_dim,
        intermediate_size=_get(file, f"{prefix}.feed_forward_length", int),
        rms_norm_eps=_get(file, f"{prefix}.attention.layer_norm_rms_epsilon", float),
        rope=rope,
        rotary_dim=head_dim,
        qkv_bias="blk.0.attn_q.bias" in file.tensors,
        output_bias="blk.0.attn_output.bias" in file.tensors,
        mlp_bias="blk.0.ffn_gate.bias" in file.tensors,
        qk_norm=model.qk_norm,
    )
    return ModelConfig(
        architecture=model.__name__,
        hidden_size=hidden_size,
        num_layers=_get(file, f"{prefix}.block_count", int),
        vocab_size=file.tensors["token_embd.weight"].shape[0],
        max_position_embeddings=extended_positions(rope, context_length),
        tie_word_embeddings="output.weight" not in file.tensors,
        dtype=torch.float32,
        family=family,
    )


def gguf_weights(file: GGUFFile, model: CausalLM) -> Iterator[tuple[str, Tensor]]:
    """Yield the weights of a model, as their names in transformers' checkpoints and float32
    values."""
    assert isinstance(model, DenseForCausalLM)
    shape = model.family.attention
    heads = {"q_proj": shape.num_heads, "k_proj": shape.num_kv_heads}
    for name in file.tensors:
        if name == _ROPE_FACTORS:
            continue
        hf_name = _hf_name(name)
        tensor = file.load(name)
        projection = hf_name.rpartition(".")[0].rpartition(".")[2]
        number = heads.get(projection) if model.gguf_permutes_qk else None
        # A wrong shape is reported by the loader.
        if number is not None and len(tensor) == number * shape.head_dim:
            # In a head of D rows, the file interleaves the rows i and i + D/2, which are rotated as
            # a pair. This restores the order of transformers.
            pairs = tensor.view(number, -1, 2, *tensor.shape[1:])
            tensor = pairs.transpose(1, 2).reshape(tensor.shape)
        yield hf_name, tensor


def _hf_name(name: str) -> str:
    """Return a tensor's name in transformers' checkpoints. Unknown names are returned unchanged."""
    stem, _, suffix = name.rpartition(".")
    if stem in _TOP:
        return f"{_TOP[stem]}.{suffix}"
    block = re.fullmatch(r"blk\.(\d+)\.(\w+)", stem)
    if block and block[2] in _BLOCK:
        return f"model.layers.{block[1]}.{_BLOCK[block[2]]}.{suffix}"
    return name


def _rope(file: GGUFFile, prefix: str) -> DefaultRope:
    """Return the rope that the file describes. Raises ValueError if it is not supported."""
    theta = _get(file, f"{prefix}.rope.freq_base", float, 10000.0)
    scaling = {
        key.removeprefix(f"{prefix}.rope.scaling."): value
        for key, value in file.metadata.items()
        if key.startswith(f"{prefix}.rope.scaling.")
    }
    scaling.pop("finetuned", None)  # this key does not change how angles are computed
    scaling_type = scaling.pop("type", "none")
    if _ROPE_FACTORS in file.tensors:
        if scaling_type != "none":
            raise ValueError(f"{_ROPE_FACTORS} with rope scaling {scaling_type!r}")
        return FrequencyFactorsRope(theta, tuple(file.load(_ROPE_FACTORS).tolist()))
    rope: DefaultRope | None = None
    if scaling_type == "none" and not scaling:
        rope = DefaultRope(theta)
    elif scaling_type == "linear" and scaling.keys() == {"factor"}:
        rope = LinearRope(theta, scaling["factor"])
    elif scaling_type == "yarn" and scaling.keys() == {"factor", "original_context_length"}:
        rope = YarnRope(theta, scaling["factor"], scaling["original_context_length"])
    if rope is None:
        raise ValueError(
            f"rope scaling {scaling_type!r} with {sorted(scaling)} is not supported; "
            "supported: linear (factor) and yarn (factor, original_context_length)"
        )
    return rope


def _get(file: GGUFFile, key: str, kind: type[T], default: T | None = None) -> T:
    """Return a metadata value of this type, or the default if the key is missing."""
    value = file.metadata.get(key, default)
    if not isinstance(value, kind):
        raise ValueError(f"metadata {key} is missing or not of type {kind.__name__}")
    return value
