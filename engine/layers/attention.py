from __future__ import annotations

import torch
from torch import Tensor, nn

from batchgen.engine.forward_context import ForwardContext
from batchgen.engine.layers.linear import Linear, MergedLinear
from batchgen.engine.layers.norm import RMSNorm
from batchgen.engine.model_config import ModelConfig
from batchgen.kernels.attention import paged_attention
from batchgen.kernels.kv_cache import write_kv
from batchgen.kernels.rotary import apply_rotary


class Attention(nn.Module):
    """Causal grouped-query self-attention over the paged cache, with optional q/k norms."""

    def __init__(
        self, config: ModelConfig, layer_index: int, *, device: torch.device, dtype: torch.dtype
    ) -> None:
        super().__init__()
        self.layer_index = layer_index
        self.head_dim = config.head_dim
        self.scale = config.head_dim**-0.5
        parts = {
            "q_proj": config.num_heads * config.head_dim,
            "k_proj": config.num_kv_heads * config.head_dim,
            "v_proj": config.num_kv_heads * config.head_dim,
        }
        bias = config.attention_bias
        self.qkv_proj = MergedLinear(
            config.hidden_size, parts, bias=bias, device=device, dtype=dtype
        )
        self.o_proj = Linear(
            parts["q_proj"], config.hidden_size, bias=bias, device=device, dtype=dtype
        )
        self.q_norm: RMSNorm | None = None
        self.k_norm: RMSNorm | None = None
        if config.qk_norm:
            eps = config.rms_norm_eps
            self.q_norm = RMSNorm(config.head_dim, eps, device=device, dtype=dtype)
            self.k_norm = RMSNorm(config.head_dim, eps, device=device, dtype=dtype)

    def forward(self, hidden: Tensor, cos_sin: Tensor, ctx: ForwardContext) -> Tensor:
        """[T, hidden_size] → [T, hidden_size]; writes the tokens' KV into this layer's cache."""
        qkv = self.qkv_proj(hidden).split(list(self.qkv_proj.parts.values()), dim=-1)
        q, k, v = (x.unflatten(-1, (-1, self.head_dim)) for x in qkv)
        if self.q_norm is not None and self.k_norm is not None:
            q, k = self.q_norm(q), self.k_norm(k)
        q, k = apply_rotary(q, k, cos_sin)
        cache = ctx.kv_caches[self.layer_index]
        write_kv(k, v, cache, ctx.slots)
        out: Tensor = self.o_proj(paged_attention(q, cache, ctx.attention, self.scale).flatten(1))
        return out
