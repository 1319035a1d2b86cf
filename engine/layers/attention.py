from __future__ import annotations

import torch
from torch import Tensor, nn

from batchgen.engine.execution.forward_context import ForwardContext, OutputTokens
from batchgen.engine.layers.linear import Linear, MergedLinear
from batchgen.engine.layers.norm import RMSNorm
from batchgen.engine.models.config import ModelConfig
from batchgen.kernels.attention.attention import paged_attention
from batchgen.kernels.attention.qkv import prepare_qkv


class Attention(nn.Module):
    """Causal grouped-query self-attention over the paged cache, with optional q/k norms.

    Its result is added to the residual.
    """

    def __init__(
        self, config: ModelConfig, layer_index: int, *, device: torch.device, dtype: torch.dtype
    ) -> None:
        super().__init__()
        self.layer_index = layer_index
        self.num_heads, self.num_kv_heads = config.num_heads, config.num_kv_heads
        self.norm_eps = config.rms_norm_eps
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
            eps = self.norm_eps
            self.q_norm = RMSNorm(config.head_dim, eps, device=device, dtype=dtype)
            self.k_norm = RMSNorm(config.head_dim, eps, device=device, dtype=dtype)

    def forward(
        self,
        hidden: Tensor,
        residual: Tensor,
        cos_sin: Tensor,
        ctx: ForwardContext,
        outputs: OutputTokens | None = None,
    ) -> Tensor:
        """residual + attention(hidden), [T, hidden_size] all, or [R, hidden_size] of the R outputs.

        Writes the KV of all T tokens into this layer's cache, and the result to residual.
        """
        cache = ctx.kv_caches[self.layer_index]
        q = prepare_qkv(
            self.qkv_proj(hidden),
            None if self.q_norm is None else self.q_norm.weight,
            None if self.k_norm is None else self.k_norm.weight,
            self.norm_eps,
            cos_sin,
            cache,
            ctx.slots,
            self.num_heads,
            self.num_kv_heads,
        )
        attention = ctx.attention
        if outputs is not None:
            q, residual, attention = q[outputs.index], residual[outputs.index], outputs.attention
        attended = paged_attention(q, cache, attention, self.scale).flatten(1)
        return self.o_proj.add_to(residual, attended)
