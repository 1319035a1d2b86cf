"""nano_sdar: the Qwen3 architecture trained by block diffusion, as SDAR is (Cheng et al. 2025).

A sequence is cut into blocks of `block_size` positions, counted from its start. Attention is causal
over blocks and full inside a block. The logits of a position predict the token at that position,
which is the mask token until it is known. The model has a few million parameters, so this code runs
on one device and without a KV cache.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from nano_layers import MLP, angles, draw_weights, rotate
from nano_tokenizer import IM_END_ID, MASK_ID, PAD_ID, VOCAB_SIZE
from torch import Tensor, nn


@dataclass(frozen=True, slots=True)
class NanoConfig:
    """The shapes of the model; `block_size` is the number of positions of a diffusion block."""

    hidden_size: int = 256
    num_layers: int = 6
    num_heads: int = 4
    num_kv_heads: int = 2
    head_dim: int = 64
    intermediate_size: int = 768
    rms_norm_eps: float = 1e-6
    rope_theta: float = 10_000.0
    max_position_embeddings: int = 512
    block_size: int = 4

    def to_hf(self) -> dict[str, Any]:
        """Return the contents of config.json, with the keys of SDAR's checkpoints."""
        return {
            "architectures": ["SDARForCausalLM"],
            "model_type": "sdar",
            "attention_bias": False,
            "attention_dropout": 0.0,
            "block_size": self.block_size,
            "dtype": "bfloat16",
            "eos_token_id": IM_END_ID,
            "head_dim": self.head_dim,
            "hidden_act": "silu",
            "hidden_size": self.hidden_size,
            "initializer_range": 0.02,
            "intermediate_size": self.intermediate_size,
            "mask_token_id": MASK_ID,
            "max_position_embeddings": self.max_position_embeddings,
            "max_window_layers": self.num_layers,
            "num_attention_heads": self.num_heads,
            "num_hidden_layers": self.num_layers,
            "num_key_value_heads": self.num_kv_heads,
            "pad_token_id": PAD_ID,
            "rms_norm_eps": self.rms_norm_eps,
            "rope_theta": self.rope_theta,
            "sliding_window": None,
            "tie_word_embeddings": True,
            "use_cache": True,
            "use_sliding_window": False,
            "vocab_size": VOCAB_SIZE,
        }


class RMSNorm(nn.Module):
    def __init__(self, size: int, eps: float) -> None:
        super().__init__()
        self.weight, self.eps = nn.Parameter(torch.ones(size)), eps

    def forward(self, x: Tensor) -> Tensor:
        return F.rms_norm(x.float(), self.weight.shape, self.weight, self.eps)


class Attention(nn.Module):
    def __init__(self, config: NanoConfig) -> None:
        super().__init__()
        self.heads, self.groups = config.num_heads, config.num_heads // config.num_kv_heads
        size, width = config.hidden_size, config.head_dim
        self.q_proj = nn.Linear(size, config.num_heads * width, bias=False)
        self.k_proj = nn.Linear(size, config.num_kv_heads * width, bias=False)
        self.v_proj = nn.Linear(size, config.num_kv_heads * width, bias=False)
        self.o_proj = nn.Linear(config.num_heads * width, size, bias=False)
        self.q_norm = RMSNorm(width, config.rms_norm_eps)
        self.k_norm = RMSNorm(width, config.rms_norm_eps)

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor, mask: Tensor) -> Tensor:
        batch, length, _ = x.shape
        shape = (batch, length, -1, self.q_norm.weight.numel())
        v = self.v_proj(x).view(shape).transpose(1, 2)
        q = rotate(self.q_norm(self.q_proj(x).view(shape)).transpose(1, 2), cos, sin).to(v.dtype)
        k = rotate(self.k_norm(self.k_proj(x).view(shape)).transpose(1, 2), cos, sin).to(v.dtype)
        # The KV heads are repeated, as PyTorch's fast kernels take either a mask or grouped heads.
        k, v = (t.repeat_interleave(self.groups, dim=1) for t in (k, v))
        out = F.scaled_dot_product_attention(q, k, v, attn_mask=mask)
        projected: Tensor = self.o_proj(out.transpose(1, 2).reshape(batch, length, -1))
        return projected


class Layer(nn.Module):
    def __init__(self, config: NanoConfig) -> None:
        super().__init__()
        self.self_attn, self.mlp = (
            Attention(config),
            MLP(config.hidden_size, config.intermediate_size),
        )
        self.input_layernorm = RMSNorm(config.hidden_size, config.rms_norm_eps)
        self.post_attention_layernorm = RMSNorm(config.hidden_size, config.rms_norm_eps)

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor, mask: Tensor) -> Tensor:
        x = x + self.self_attn(self.input_layernorm(x), cos, sin, mask)
        out: Tensor = x + self.mlp(self.post_attention_layernorm(x))
        return out


class Decoder(nn.Module):
    def __init__(self, config: NanoConfig) -> None:
        super().__init__()
        self.embed_tokens = nn.Embedding(VOCAB_SIZE, config.hidden_size)
        self.layers = nn.ModuleList(Layer(config) for _ in range(config.num_layers))
        self.norm = RMSNorm(config.hidden_size, config.rms_norm_eps)


class NanoSDAR(nn.Module):
    """The model. Its state dict has HuggingFace's names for Qwen3; the output embedding is tied."""

    def __init__(self, config: NanoConfig, seed: int = 0) -> None:
        super().__init__()
        self.config, self.model = config, Decoder(config)
        generator = torch.Generator().manual_seed(seed)
        last = ("o_proj.weight", "down_proj.weight")
        draw_weights(self.named_parameters(), config.num_layers, generator, last=last)

    def forward(self, ids: Tensor, positions: Tensor, mask: Tensor) -> Tensor:
        """Compute the hidden states [B, T, hidden_size] after the last norm.

        Args:
            ids: [B, T] int64.
            positions: [T] int64, for the rotary embedding.
            mask: [T, T] bool: whether a query (row) sees a key (column).
        """
        cos, sin = angles(positions, self.config.head_dim, self.config.rope_theta)
        x = self.model.embed_tokens(ids)
        for layer in self.model.layers:
            x = layer(x, cos, sin, mask)
        out: Tensor = self.model.norm(x)
        return out

    def logits(self, hidden: Tensor) -> Tensor:
        """Compute the logits [..., vocab_size] float32 of hidden states [..., hidden_size]."""
        return F.linear(hidden, self.model.embed_tokens.weight).float()
