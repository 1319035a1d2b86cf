"""Mamba2: a recurrence with a decaying matrix as its state."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor

from batchgen.engine.caches.forward_context import ForwardContext, OutputTokens
from batchgen.engine.layers.linear import RowParallelLinear, empty_parameter
from batchgen.engine.layers.merged_linear import MergedLinear
from batchgen.engine.layers.mixers.delta_shape import DeltaShape
from batchgen.engine.layers.mixers.recurrence import Recurrence
from batchgen.engine.layers.weight_slot import WeightSlot
from batchgen.engine.parallel.placement import Placement
from batchgen.engine.parallel.shard import Shard
from batchgen.engine.parallel.tensor_parallel import MIXER_LANE, NORM_LANE, Stream, TensorParallel
from batchgen.kernels.layers.elementwise import silu
from batchgen.kernels.linear_attention.gated_norm import norm_of_gated


@dataclass(frozen=True, slots=True, kw_only=True)
class MambaShape:
    """The sizes of a Mamba2 mixer, and which optional parts it has."""

    num_heads: int
    head_dim: int
    num_groups: int  # divides num_heads; the heads of a group share B and C
    state_size: int  # the size of B and of C
    conv_width: int  # the number of tokens in the convolution's window, the current one included
    conv_bias: bool
    in_bias: bool  # whether the input projection has a bias
    out_bias: bool  # whether the output projection has a bias
    norm_eps: float | None  # the eps of the norm of the gated output; None: no norm
    # Factors of gate, x, B, C and dt after the input projection; empty: none.
    factors: tuple[float, ...] = ()

    @property
    def delta(self) -> DeltaShape:
        """The shape of the recurrence as a delta network, with C as query, B as key and x as
        value."""
        return DeltaShape(
            num_key_heads=self.num_groups,
            num_value_heads=self.num_heads,
            key_dim=self.state_size,
            value_dim=self.head_dim,
            conv_width=self.conv_width,
        )


class Mamba2(Recurrence):
    """A Mamba2 mixer, added to the residual (Dao and Gu 2024, arXiv 2405.21060).

    Each head carries a matrix S [head_dim, state_size] from token to token:

        S ← e^(−Δ·exp(A_log)) · S + Δ · x·Bᵀ,  y = S·C + D · x,  Δ = softplus(dt + dt_bias)

    x, B and C come from a projection and a causal convolution. The output is gated, normalised over
    the heads of each group, and projected.

    Each rank has some groups and their heads. With fewer groups than ranks, several ranks share a
    group, and the norm adds up their sums of squares.
    """

    def __init__(
        self, layer: int, hidden_size: int, shape: MambaShape, *, where: Placement
    ) -> None:
        whole, parallel = shape.delta, where.parallel
        parallel.share("number of Mamba heads", shape.num_heads)  # raises if ranks do not divide it
        first, last = parallel.kv_heads(shape.num_groups, "number of Mamba groups")
        dims = DeltaShape(
            num_key_heads=last - first,
            num_value_heads=shape.num_heads // parallel.size,
            key_dim=whole.key_dim,
            value_dim=whole.value_dim,
            conv_width=whole.conv_width,
        )
        sizes = [dims.values, dims.keys, dims.keys]
        rows = channels = heads = None
        if parallel.size > 1:
            rows, channels, heads = _shards(whole, (first, last), parallel)
        super().__init__(
            layer,
            dims,
            channels=channels,
            heads=heads,
            arrange=partial(_queries_first, sizes=sizes),
            conv_bias=shape.conv_bias,
            skips=True,  # adds D · x
            where=where,
        )
        self._parallel, self._size = parallel, whole.values
        self._factors: Tensor | None = None
        if shape.factors:
            gate, x, b, c, dt = torch.tensor(shape.factors, dtype=torch.float32).split(1)
            parts = zip(
                (c, b, x, gate, dt),
                (dims.keys, dims.keys, dims.values, dims.values, dims.num_value_heads),
                strict=True,
            )
            factors = torch.cat([factor.expand(size) for factor, size in parts])
            self._factors = factors.to(where.device, where.dtype)
        # The number of ranks that share the heads of a group.
        self._copies = max(1, parallel.size // shape.num_groups)
        self.projection = MergedLinear(
            hidden_size,
            {"in_proj": dims.channels + dims.values + dims.num_value_heads},
            bias=shape.in_bias,
            arrange={
                "in_proj": partial(
                    _channels_first, sizes=[dims.values, *sizes, dims.num_value_heads]
                )
            },
            shards=None if rows is None else {"in_proj": rows},
            where=where,
        )
        self.out_proj = RowParallelLinear(
            whole.values, hidden_size, bias=shape.out_bias, lane=MIXER_LANE, where=where
        )
        self.norm_weight, self._eps = None, shape.norm_eps or 0.0
        if shape.norm_eps is not None:
            self.norm_weight = empty_parameter(
                dims.values, device=where.device, dtype=torch.float32
            )

    def forward(
        self,
        hidden: Tensor,
        residual: Tensor | None,
        cos_sin: Tensor | None,
        ctx: ForwardContext,
        outputs: OutputTokens | None,
    ) -> Stream:
        """Return residual + mixed(hidden) as `Mixer` describes. States are read and written as
        `RowMetadata` says."""
        shape = self.shape
        projected = self.projection(hidden)
        if self._factors is not None:
            projected = projected * self._factors
        mixed, gate, dt = projected.split(
            [shape.channels, shape.values, shape.num_value_heads], dim=1
        )
        out = self.mix(mixed, dt, None, ctx)
        if outputs is not None:
            out, gate = (x[outputs.index] for x in (out, gate))
            residual = outputs.rows(residual)
        return self.out_proj.add_to(residual, self._normed(out, gate))

    def _normed(self, out: Tensor, gate: Tensor) -> Tensor:
        """Gate and normalise this rank's outputs [T, heads, head_dim]. Returns [T, values]."""
        groups = out.flatten(1).unflatten(1, (self.shape.num_key_heads, -1))
        if self.norm_weight is None or self._copies == 1:
            return norm_of_gated(groups, gate, self.norm_weight, self._eps)
        gated = out.flatten(1).float() * silu(gate.float())
        square_sum = gated.square().sum(-1, keepdim=True)
        parts = self._parallel.gather(square_sum, NORM_LANE)
        start = self._parallel.rank // self._copies * self._copies
        total, *others = parts[:, start : start + self._copies].split(1, 1)
        for part in others:
            total = total + part
        size = self._copies * gated.shape[1]
        scaled = gated * torch.rsqrt(total / size + self._eps) * self.norm_weight
        return scaled.to(out.dtype)

    def weight_slots(self, path: str) -> Iterator[WeightSlot]:
        """Yield the slots of the parameters that are not in a linear layer."""
        yield from super().weight_slots(path)
        if self.norm_weight is not None:
            name, shard = f"{path}.norm.weight", None
            if self._parallel.size > 1:
                shard = self._parallel.shard(0, self._size)
            yield WeightSlot.plain(name, self.norm_weight, dummy=1.0, shard=shard)


def _shards(
    whole: DeltaShape, groups: tuple[int, int], parallel: TensorParallel
) -> tuple[Shard, Shard, Shard]:
    """Return this rank's rows of the input projection (gate, x, B, C, dt in checkpoints), its
    channels of the convolution (x, B, C), and its heads."""
    (values,) = parallel.shard(0, whole.values).ranges
    heads = parallel.shard(0, whole.num_value_heads)
    keys = groups[0] * whole.key_dim, groups[1] * whole.key_dim
    sizes = [whole.values, whole.keys, whole.keys]
    channels = _side_by_side(sizes, [values, keys, keys])
    rows = _side_by_side(
        [whole.values, *sizes, whole.num_value_heads], [values, values, keys, keys, *heads.ranges]
    )
    return rows, channels, heads


def _side_by_side(sizes: list[int], ranges: list[tuple[int, int]]) -> Shard:
    """Return the shard that takes one range of each of several parts of the first axis, which have
    these sizes."""
    start, columns = 0, []
    for size, (first, last) in zip(sizes, ranges, strict=True):
        columns.append((start + first, start + last))
        start += size
    return Shard(0, start, tuple(columns))


def _queries_first(rows: Tensor, sizes: list[int]) -> Tensor:
    """Reorder rows of x, B and C, of these sizes, to C, B, x (query, key, value)."""
    x, b, c = rows.split(sizes)
    return torch.cat([c, b, x])


def _channels_first(rows: Tensor, sizes: list[int]) -> Tensor:
    """Reorder rows of gate, x, B, C and dt, of these sizes, to C, B, x (query, key, value), gate,
    dt."""
    gate, x, b, c, dt = rows.split(sizes)
    return torch.cat([c, b, x, gate, dt])
