"""Grouped-query self-attention over the paged cache."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from batchgen.engine.cache.specs import CacheSpec, KVSpec
from batchgen.engine.execution.forward_context import ForwardContext, OutputTokens
from batchgen.engine.layers.linear import Linear, MergedLinear
from batchgen.engine.layers.norm import RMSNorm
from batchgen.kernels.attention.attention import paged_attention
from batchgen.kernels.attention.kv_cache import KVCache
from batchgen.kernels.attention.qkv import prepare_qkv


class Attention(nn.Module):
    """Causal grouped-query self-attention with rotary embedding, added to the residual.

    Grouped-query attention is from Ainslie et al. 2023, rotary embedding from Su et al. 2021.

    Args:
        layer: the layer's index, under which it finds its cache.
        hidden_size: the width of the hidden states.
        shape: the numbers of heads and their size.
        qkv_bias: whether the projections to queries, keys and values have a bias.
        output_bias: whether the output projection has a bias.
        norm_eps: the epsilon of an RMSNorm over the head_dim values of each query and key head;
            None if there is no such norm.
        device: where the parameters are created.
        dtype: the dtype of the parameters.
    """

    def __init__(
        self,
        layer: int,
        hidden_size: int,
        shape: KVSpec,
        *,
        qkv_bias: bool,
        output_bias: bool,
        norm_eps: float | None,
        device: torch.device,
        dtype: torch.dtype,
    ) -> None:
        super().__init__()
        self.layer = layer
        self.shape = shape
        self.cache_spec: CacheSpec | None = shape
        self.scale = shape.head_dim**-0.5
        parts = {
            "q_proj": shape.num_heads * shape.head_dim,
            "k_proj": shape.num_kv_heads * shape.head_dim,
            "v_proj": shape.num_kv_heads * shape.head_dim,
        }
        self.qkv_proj = MergedLinear(hidden_size, parts, bias=qkv_bias, device=device, dtype=dtype)
        self.o_proj = Linear(
            parts["q_proj"], hidden_size, bias=output_bias, device=device, dtype=dtype
        )
        self.q_norm: RMSNorm | None = None
        self.k_norm: RMSNorm | None = None
        self.norm_eps = 0.0 if norm_eps is None else norm_eps
        if norm_eps is not None:
            self.q_norm = RMSNorm(shape.head_dim, norm_eps, device=device, dtype=dtype)
            self.k_norm = RMSNorm(shape.head_dim, norm_eps, device=device, dtype=dtype)

    def forward(
        self,
        hidden: Tensor,
        residual: Tensor,
        cos_sin: Tensor | None,
        ctx: ForwardContext,
        outputs: OutputTokens | None,
    ) -> Tensor:
        """Return residual + attention(hidden), as `Mixer` says.

        The keys and values of all T tokens are written into the layer's cache, and the result
        overwrites the residual.
        """
        assert cos_sin is not None
        cache = ctx.cache(self.layer, KVCache)
        q = prepare_qkv(
            self.qkv_proj(hidden),
            None if self.q_norm is None else self.q_norm.weight,
            None if self.k_norm is None else self.k_norm.weight,
            self.norm_eps,
            cos_sin,
            cache,
            ctx.kv_slots,
            self.shape.num_heads,
            self.shape.num_kv_heads,
        )
        attention = ctx.attention
        if outputs is not None:
            q, residual, attention = q[outputs.index], residual[outputs.index], outputs.attention
        attended = paged_attention(q, cache, attention, self.scale).flatten(1)
        return self.o_proj.add_to(residual, attended)
