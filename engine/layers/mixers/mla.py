"""Multi-head latent attention (MLA) over the paged cache, as in DeepSeek's models.

The cache holds one short vector per token, its *latent*, from which the keys and values of all
heads are computed (`kernels/mla`).
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial

import torch
from torch import Tensor, nn

from batchgen.engine.caches.cache_specs import CacheSpec, LatentCache, LatentSpec
from batchgen.engine.caches.forward_context import ForwardContext, OutputTokens
from batchgen.engine.layers.linear import Linear, RowParallelLinear
from batchgen.engine.layers.merged_linear import MergedLinear
from batchgen.engine.layers.mixers.kv_expansion import KVExpansion
from batchgen.engine.layers.norm import RMSNorm
from batchgen.engine.parallel.placement import Placement
from batchgen.engine.parallel.shard import Shard
from batchgen.engine.parallel.tensor_parallel import MIXER_LANE, Stream
from batchgen.kernels.fp8.quantise import FP8Rows
from batchgen.kernels.mla.latent_prepare import prepare_latent
from batchgen.kernels.mla.mla_attention import latent_attention


@dataclass(frozen=True, slots=True)
class LatentShape:
    """The sizes of latent attention."""

    num_heads: int
    query_rank: int | None  # the size of the compressed query (`q_lora_rank`); None: no compression
    latent_size: int  # the size of a token's latent (`kv_lora_rank`)
    key_size: int  # the part of a head's key that comes from the latent (`qk_nope_head_dim`)
    rotated_size: int  # the rotated key that all heads share (`qk_rope_head_dim`)
    value_size: int  # the size of a head's value (`v_head_dim`)

    @property
    def query_size(self) -> int:
        """The size of a head's query: first `key_size` values, then `rotated_size`."""
        return self.key_size + self.rotated_size

    @property
    def spec(self) -> LatentSpec:
        """The cache spec of a layer of this shape."""
        return LatentSpec(self.num_heads, self.latent_size, self.rotated_size)


class LatentAttention(nn.Module):
    """Causal multi-head latent attention, added to the residual (DeepSeek-AI 2024, 2405.04434).

    Each rank has some of the heads, and the cache of all latents.

    Args:
        bias: whether the projections from the hidden states and the output projection have biases.
        interleaved: whether the two values of a rotated pair are neighbours in checkpoints, instead
            of being in two halves.
    """

    def __init__(
        self,
        layer: int,
        hidden_size: int,
        shape: LatentShape,
        *,
        bias: bool,
        norm_eps: float,
        scale: float,
        interleaved: bool,
        where: Placement,
    ) -> None:
        super().__init__()
        whole, parallel = shape.num_heads, where.parallel
        shape = replace(shape, num_heads=parallel.share("num_attention_heads", whole))
        self.layer, self.shape, self.scale = layer, shape, scale
        self.cache_spec: CacheSpec | None = replace(shape.spec, in_fp8=where.fp8_cache)
        queries = shape.num_heads * shape.query_size
        query = "q_proj" if shape.query_rank is None else "q_a_proj"
        latent = "kv_a_proj_with_mqa"
        arrange: dict[str, Callable[[Tensor], Tensor]] = {}
        if interleaved:
            arrange[latent] = partial(
                _pairs_apart, head=shape.spec.head_dim, rotated=shape.rotated_size
            )
            arrange["q_proj" if shape.query_rank is None else "q_b_proj"] = partial(
                _pairs_apart, head=shape.query_size, rotated=shape.rotated_size
            )
        self._sizes = [shape.query_rank or queries, shape.spec.head_dim]
        parts = dict(zip((query, latent), self._sizes, strict=True))
        shards: dict[str, Shard] = {}
        if parallel.size > 1:
            name = "q_proj" if shape.query_rank is None else "q_b_proj"
            shards[name] = parallel.shard(0, whole * shape.query_size)
        self.down_proj = MergedLinear(
            hidden_size, parts, bias=bias, arrange=arrange, shards=shards, where=where
        )
        self.q_a_layernorm: RMSNorm | None = None
        if shape.query_rank is not None:
            self.q_a_layernorm = RMSNorm(shape.query_rank, norm_eps, where=where)
            self.query_up_proj = MergedLinear(
                shape.query_rank,
                {"q_b_proj": queries},
                bias=False,
                arrange=arrange,
                shards=shards,
                where=where,
            )
        self.kv_a_layernorm = RMSNorm(shape.latent_size, norm_eps, where=where)
        self.kv_b_proj = KVExpansion(
            whole, shape.latent_size, shape.key_size, shape.value_size, where=where
        )
        self.o_proj = RowParallelLinear(
            whole * shape.value_size, hidden_size, bias=bias, lane=MIXER_LANE, where=where
        )

    @property
    def input_projection(self) -> Linear:
        """The only module that reads the hidden states."""
        return self.down_proj

    def forward(
        self,
        hidden: Tensor | FP8Rows,
        residual: Tensor | None,
        cos_sin: Tensor | None,
        ctx: ForwardContext,
        outputs: OutputTokens | None,
    ) -> Stream:
        """Return residual + attention(hidden) as `Mixer` describes, written over the residual."""
        assert cos_sin is not None
        plane, scales = ctx.cache(self.layer, LatentCache)
        q, latent = self.down_proj(hidden).split(self._sizes, dim=1)
        if self.q_a_layernorm is not None:
            q = self.query_up_proj(self.q_a_layernorm(q))
        q = prepare_latent(
            q.unflatten(1, (self.shape.num_heads, -1)),
            latent,
            self.kv_a_layernorm.weight,
            self.kv_a_layernorm.eps,
            cos_sin,
            plane,
            ctx.kv_slots,
            scales,
        )
        attention = ctx.attention
        if outputs is not None:
            q, residual, attention = q[outputs.index], outputs.rows(residual), outputs.attention
        attended = latent_attention(
            q, plane, self.kv_b_proj, self.shape.rotated_size, attention, self.scale, scales
        )
        return self.o_proj.add_to(residual, attended.flatten(1))


def _pairs_apart(rows: Tensor, head: int, rotated: int) -> Tensor:
    """Move the second values of rotated pairs after all first ones: rows 0 1 2 3 become 0 2 1 3.
    The rotated rows are the last `rotated` of each head's `head` rows."""
    heads = rows.unflatten(0, (-1, head))
    fixed, turned = heads.split([head - rotated, rotated], dim=1)
    return torch.cat((fixed, turned[:, ::2], turned[:, 1::2]), 1).flatten(0, 1)
