"""Grouped-query self-attention over the paged cache, with the variants of all model families.

The kernels are in `kernels/attention`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import partial
from typing import Literal

import torch
from torch import Tensor, nn

from batchgen.engine.caches.cache_specs import CacheSpec, KVSpec
from batchgen.engine.caches.forward_context import ForwardContext, OutputTokens
from batchgen.engine.layers.linear import Linear, RowParallelLinear, empty_parameter
from batchgen.engine.layers.merged_linear import MergedLinear
from batchgen.engine.layers.mixers.all_heads_norm import (
    AllHeadsNorm,
    EachHeadNorm,
    normed_apart,
    normed_together,
)
from batchgen.engine.layers.norm import RMSNorm
from batchgen.engine.layers.rotary import rotary_order
from batchgen.engine.layers.weight_slot import WeightSlot
from batchgen.engine.parallel.placement import Placement
from batchgen.engine.parallel.shard import Shard
from batchgen.engine.parallel.tensor_parallel import MIXER_LANE, Stream
from batchgen.kernels.attention.attention import paged_attention
from batchgen.kernels.attention.kv_cache import KVCache
from batchgen.kernels.attention.qkv import prepare_qkv
from batchgen.kernels.fp8.quantise import FP8Rows
from batchgen.kernels.layers.activation import mul_sigmoid

NormScope = Literal["head", "head alone", "each head", "all heads"]
"""What a norm of queries or keys is computed over.

- `head`: each head, with one weight for all heads.
- `head alone`: each head, without a weight.
- `each head`: each head minus its mean, with separate weights (`EachHeadNorm`).
- `all heads`: all heads of a token together (`AllHeadsNorm`).
"""


class Attention(nn.Module):
    """Causal grouped-query self-attention with rotary embedding, added to the residual.

    Grouped-query attention is from Ainslie et al. 2023, rotary embedding from Su et al. 2021. Each
    rank has some of the heads.

    Args:
        layer: the index of the layer's cache.
        shape: the numbers and size of the heads on all ranks, and the layer's window.
        qk_norm: the norm of queries and keys before rotation; None: no norm.
        query_scales: [P] float32, factors of queries after rotation, by position.
        scale: multiplies the scores; None means 1/√head_dim.
        score_cap: turns each score s into cap · tanh(s / cap).
        rotary_dim: how many values of a head are rotated; None: all.
        interleaved: whether checkpoints rotate neighbouring values of a head together
            (`rotary_order`).
        output_gate: whether the result is multiplied by sigmoid(gate) before the output projection
            (Qiu et al. 2025, arXiv 2505.06708). Checkpoints hold the gate's projection in `q_proj`:
            for each head the rows of the query, then of the gate.
        zero_centred, norms_in_float: `zero_centred` and `in_float` of `RMSNorm` for `qk_norm`.
        norms_follow_rotation: whether queries and keys are normalised after rotation instead.
        value_norm: whether the heads of values are normalised, without a weight.
        keys_are_values: whether the values are the keys before their norm and rotation.
        reads_only: whether the keys and values were written by an earlier layer, under the index
            `layer`.
        sinks: whether each head's softmax has an additional score from the checkpoint.
        looks_ahead: whether tokens of an image attend to each other
            (`AttentionMetadata.last_seen`).
    """

    def __init__(
        self,
        layer: int,
        hidden_size: int,
        shape: KVSpec,
        *,
        qkv_bias: bool,
        output_bias: bool,
        qk_norm: NormScope | None = None,
        norm_eps: float = 0.0,
        query_scales: Tensor | None = None,
        scale: float | None = None,
        score_cap: float | None = None,
        rotary_dim: int | None = None,
        interleaved: bool = False,
        output_gate: bool = False,
        zero_centred: bool = False,
        norms_in_float: bool = False,
        norms_follow_rotation: bool = False,
        value_norm: bool = False,
        keys_are_values: bool = False,
        reads_only: bool = False,
        sinks: bool = False,
        looks_ahead: bool = False,
        where: Placement,
    ) -> None:
        super().__init__()
        self.layer, parallel = layer, where.parallel
        whole, own_heads = shape, parallel.share("num_attention_heads", shape.num_heads)
        kv_heads = parallel.kv_heads(whole.num_kv_heads)
        shape = replace(shape, num_heads=own_heads, num_kv_heads=kv_heads[1] - kv_heads[0])
        shape = replace(shape, in_fp8=where.fp8_cache)
        self.shape = shape
        self.cache_spec: CacheSpec | None = None if reads_only else shape
        self._own_kv_heads = 0 if reads_only else shape.num_kv_heads
        self.scale = shape.head_dim**-0.5 if scale is None else scale
        self._score_cap, self._looks_ahead = score_cap, looks_ahead
        heads, head_dim = shape.num_heads, shape.head_dim
        self.sinks: nn.Parameter | None = None
        self._own_heads = parallel.shard(0, whole.num_heads) if parallel.size > 1 else None
        if sinks:
            self.sinks = empty_parameter(heads, device=where.device, dtype=where.dtype)
        order = rotary_order(head_dim, rotary_dim or head_dim, interleaved)
        self._gate_size = heads * head_dim if output_gate else 0
        parts = {
            "q_proj": heads * head_dim + self._gate_size,
            "k_proj": shape.num_kv_heads * head_dim,
            "v_proj": shape.num_kv_heads * head_dim,
        }
        if reads_only:
            del parts["k_proj"], parts["v_proj"]
        elif keys_are_values:
            del parts["v_proj"]
        shards: dict[str, Shard] = {}
        if parallel.size > 1:
            rows = whole.num_kv_heads * head_dim
            kv_shard = Shard(0, rows, ((kv_heads[0] * head_dim, kv_heads[1] * head_dim),))
            queries = parts["q_proj"] * parallel.size
            shards = dict.fromkeys(parts, kv_shard) | {"q_proj": parallel.shard(0, queries)}
        arrange: dict[str, Callable[[Tensor], Tensor]] = {}
        if output_gate:
            arrange["q_proj"] = partial(_gate_first, heads=heads, order=order)
        elif order is not None:
            arrange["q_proj"] = partial(_ordered, order=order)
        if order is not None:
            arrange["k_proj"] = partial(_ordered, order=order)
        self.qkv_proj = MergedLinear(
            hidden_size, parts, bias=qkv_bias, arrange=arrange, shards=shards, where=where
        )
        self.o_proj = RowParallelLinear(
            whole.num_heads * head_dim, hidden_size, bias=output_bias, lane=MIXER_LANE, where=where
        )
        self.q_norm: RMSNorm | AllHeadsNorm | EachHeadNorm | None = None
        self.k_norm: RMSNorm | AllHeadsNorm | EachHeadNorm | None = None
        self.norm_eps, self._query_scales = norm_eps, query_scales
        self._ones: Tensor | None = None
        self._weighs_late = norms_follow_rotation
        if norms_follow_rotation or qk_norm == "head alone":
            assert qk_norm in ("head", "head alone") and not reads_only, "no model has both"
            self._ones = torch.ones(head_dim, dtype=where.dtype, device=where.device)
        self._value_weight: Tensor | None = None
        if value_norm and not reads_only:
            self._value_weight = torch.ones(head_dim, dtype=torch.float32, device=where.device)
        if qk_norm == "head":
            norm = partial(RMSNorm, head_dim, norm_eps, zero_centred=zero_centred, order=order)
            norm = partial(norm, in_float=norms_in_float)
            self.q_norm, self.k_norm = norm(where=where), None if reads_only else norm(where=where)
        elif qk_norm in ("all heads", "each head"):
            assert not (zero_centred or output_gate or reads_only), "no model has both"
            kind = AllHeadsNorm if qk_norm == "all heads" else EachHeadNorm
            wide = partial(kind, head_dim=head_dim, eps=norm_eps, order=order, where=where)
            self.q_norm, self.k_norm = wide(whole.num_heads), wide(whole.num_kv_heads)

    @property
    def input_projection(self) -> Linear:
        """The only module that reads the hidden states."""
        return self.qkv_proj

    def weight_slots(self, path: str) -> Iterator[WeightSlot]:
        """Yield the slot of the sinks, if there are any. Submodules yield their own slots."""
        if self.sinks is not None:
            yield WeightSlot.plain(f"{path}.sinks", self.sinks, shard=self._own_heads)

    def forward(
        self,
        hidden: Tensor | FP8Rows,
        residual: Tensor | None,
        cos_sin: Tensor | None,
        ctx: ForwardContext,
        outputs: OutputTokens | None,
    ) -> Stream:
        """Return residual + attention(hidden) as `Mixer` describes, written over the residual."""
        if cos_sin is None:  # the layer has no rotary embedding
            cos_sin = torch.empty((len(ctx.kv_slots), 0), device=ctx.kv_slots.device)
        cache = ctx.cache(self.layer, KVCache)
        gate, qkv = self.qkv_proj(hidden).tensor_split([self._gate_size], dim=1)
        q_weight: Tensor | None = None
        k_weight: Tensor | None = None
        if self._ones is not None:  # weights, if there are any, follow as a factor of queries
            q_weight = k_weight = self._ones
        elif isinstance(self.q_norm, RMSNorm):
            of_keys = self.k_norm if isinstance(self.k_norm, RMSNorm) else self.q_norm
            q_weight, k_weight = self.q_norm.weight, of_keys.weight
        elif isinstance(self.q_norm, AllHeadsNorm) and isinstance(self.k_norm, AllHeadsNorm):
            qkv = normed_together(qkv, self.q_norm, self.k_norm)
        elif isinstance(self.q_norm, EachHeadNorm) and isinstance(self.k_norm, EachHeadNorm):
            qkv = normed_apart(qkv, self.q_norm, self.k_norm)
        q = prepare_qkv(
            qkv,
            q_weight,
            k_weight,
            self.norm_eps,
            cos_sin,
            cache,
            ctx.slots(self.shape.window),
            self.shape.num_heads,
            self._own_kv_heads,
            self._value_weight,
        )
        attention = ctx.attention
        if outputs is not None:
            q, residual, attention = q[outputs.index], outputs.rows(residual), outputs.attention
            gate = gate[outputs.index]
        if self._query_scales is not None:
            positions = torch.cat([part.positions for part in attention])
            q = (q * self._query_scales[positions, None, None]).to(q.dtype)
        if self._weighs_late:
            q = (q * self._late_weight()).to(q.dtype)
        attended = paged_attention(
            q, cache, attention, self.scale, window=self.shape.window, sinks=self.sinks,
            cap=self._score_cap, looks_ahead=self._looks_ahead,
        ).flatten(1)  # fmt: skip
        if self._gate_size:
            attended = mul_sigmoid(attended, gate)
        return self.o_proj.add_to(residual, attended)

    def _late_weight(self) -> Tensor:
        """Return the factor of queries when norms follow rotation, [head_dim] float32.

        Rotation keeps a head's mean square, so both norms can divide by it before. Only the product
        of the two norm weights affects scores, so queries carry the keys' weight, too.
        """
        assert isinstance(self.q_norm, RMSNorm) and isinstance(self.k_norm, RMSNorm)
        return self.q_norm.weight.float() * self.k_norm.weight.float()


def _ordered(rows: Tensor, order: Tensor) -> Tensor:
    """Reorder the rows [heads · head_dim, …] of each head; `order` is [head_dim]."""
    ordered: Tensor = rows.unflatten(0, (-1, len(order)))[:, order]
    return ordered.flatten(0, 1)


def _gate_first(rows: Tensor, heads: int, order: Tensor | None) -> Tensor:
    """Put all gates before all queries, given rows with a query and a gate per head."""
    query, gate = rows.unflatten(0, (heads, 2, -1)).unbind(1)
    query = query.flatten(0, 1)
    return torch.cat((gate.flatten(0, 1), query if order is None else _ordered(query, order)))
