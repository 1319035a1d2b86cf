"""The gated delta network: a recurrence with a matrix as its state, used instead of attention."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

import torch
from torch import Tensor

from batchgen.engine.caches.forward_context import ForwardContext, OutputTokens
from batchgen.engine.layers.linear import RowParallelLinear, empty_parameter
from batchgen.engine.layers.merged_linear import MergedLinear
from batchgen.engine.layers.mixers.delta_shape import DeltaShape, input_projections
from batchgen.engine.layers.mixers.recurrence import Recurrence
from batchgen.engine.layers.weight_slot import WeightSlot
from batchgen.engine.parallel.placement import Placement
from batchgen.engine.parallel.shard import Shard
from batchgen.engine.parallel.tensor_parallel import MIXER_LANE, Stream
from batchgen.kernels.linear_attention.gated_norm import gated_rms_norm


class GatedDeltaNet(Recurrence):
    """A gated delta network, added to the residual (Yang et al. 2024, arXiv 2412.06464).

    Each value head carries a matrix S [value_dim, key_dim] from token to token. A token's decay g,
    step size β, query q, key k and value v update S so that S·k comes closer to v, and give the
    output o:

        S ← e^g · S,  u = β · (v − S·k),  S ← S + u·kᵀ,  o = S·q

    Queries, keys and values come from a projection and a causal convolution; queries and keys are
    normalised. The output is normalised, gated and projected. Each rank has some key heads and the
    value heads that share them. Small parameters are float32, whatever checkpoints hold.

    Args:
        interleaved: whether checkpoints hold the input projections key head by key head, in
            `in_proj_qkvz` (query, key, values, output gates) and `in_proj_ba` (β, decay). Otherwise
            they are in `in_proj_qkv`, `in_proj_z`, `in_proj_b` and `in_proj_a`.
    """

    def __init__(
        self,
        layer: int,
        hidden_size: int,
        shape: DeltaShape,
        *,
        norm_eps: float,
        interleaved: bool,
        where: Placement,
    ) -> None:
        whole, parallel = shape, where.parallel
        shape = replace(
            whole,
            num_key_heads=parallel.share("linear_num_key_heads", whole.num_key_heads),
            num_value_heads=parallel.share("linear_num_value_heads", whole.num_value_heads),
        )
        parts, gates, arrange = input_projections(shape, interleaved)
        channels: Shard | None = None
        heads: Shard | None = None
        shards: dict[str, Shard] = {}
        if parallel.size > 1:
            # A share of the queries, of the keys and of the values.
            channels = parallel.shard(0, whole.keys, whole.keys, whole.values)
            heads = parallel.shard(0, whole.num_value_heads)
            shards = {
                name: parallel.shard(0, parallel.size * rank_size)
                for name, rank_size in parts.items()
            }
            if not interleaved:
                shards["in_proj_qkv"] = channels
        super().__init__(layer, shape, channels=channels, heads=heads, where=where)
        self.eps = norm_eps
        self.in_proj = MergedLinear(
            hidden_size,
            parts,
            bias=False,
            arrange=arrange,
            shards=shards,
            unquantised=gates,
            where=where,
        )
        self.out_proj = RowParallelLinear(
            whole.values, hidden_size, bias=False, lane=MIXER_LANE, where=where
        )
        self.norm_weight = empty_parameter(
            shape.value_dim, device=where.device, dtype=torch.float32
        )

    def forward(
        self,
        hidden: Tensor,
        residual: Tensor | None,
        cos_sin: Tensor | None,
        ctx: ForwardContext,
        outputs: OutputTokens | None,
    ) -> Stream:
        """Return residual + network(hidden), [T, hidden_size], or [R, hidden_size] for `outputs`.
        States are read and written as `RowMetadata` says. `cos_sin` is not used."""
        shape, heads = self.shape, self.shape.num_value_heads
        # `mixed`: queries, keys and values. `b` and `a` become the step sizes and decays.
        mixed, gate, b, a = self.in_proj(hidden).split(
            [shape.channels, shape.values, heads, heads], dim=1
        )
        out = self.mix(mixed, a, b, ctx)
        if outputs is not None:
            out, gate = (x[outputs.index] for x in (out, gate))
            residual = outputs.rows(residual)
        normed = gated_rms_norm(out, gate, self.norm_weight, self.eps)
        return self.out_proj.add_to(residual, normed)

    def weight_slots(self, path: str) -> Iterator[WeightSlot]:
        """Yield the slots of the parameters that are not in a linear layer."""
        yield from super().weight_slots(path)
        yield WeightSlot.plain(f"{path}.norm.weight", self.norm_weight, dummy=1.0)
