"""The gated delta network: a recurrence with a matrix as its state, in place of attention."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from functools import partial
from itertools import accumulate

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from batchgen.engine.caches.cache_specs import CacheSpec
from batchgen.engine.caches.forward_context import ForwardContext, OutputTokens, RowMetadata
from batchgen.engine.caches.row_states import StateCache
from batchgen.engine.device.transfer import upload
from batchgen.engine.layers.linear import RowParallelLinear, empty_parameter
from batchgen.engine.layers.merged_linear import MergedLinear
from batchgen.engine.layers.mixers.delta_shape import DeltaShape, input_projections, state_spec
from batchgen.engine.layers.weight_slot import WeightSlot
from batchgen.engine.parallel.placement import Placement
from batchgen.engine.parallel.shard import Shard
from batchgen.engine.parallel.tensor_parallel import MIXER_LANE, Stream
from batchgen.kernels.attention.metadata import are_replayed
from batchgen.kernels.linear_attention.causal_conv import causal_conv_prefill, causal_conv_step
from batchgen.kernels.linear_attention.delta_inputs import DeltaInputs, DeltaRecords
from batchgen.kernels.linear_attention.delta_replay import delta_replay
from batchgen.kernels.linear_attention.delta_rule import delta_prefill, delta_step
from batchgen.kernels.linear_attention.gated_norm import gated_rms_norm
from batchgen.kernels.linear_attention.state_rows import PrefillRows, StepRows


class GatedDeltaNet(nn.Module):
    """A gated delta network, added to the residual (Yang et al. 2024, arXiv 2412.06464).

    Each value head carries a matrix S [value_dim, key_dim] from token to token, which fades by a
    factor that depends on the token, and moves what it makes of the token's key towards the token's
    value:

        S ← e^g · S,  u = β · (v − S·k),  S ← S + u·kᵀ,  o = S·q

    Queries, keys and values come from a projection and a causal convolution over the last tokens;
    queries and keys are normalised. The output is normalised, gated, and projected. Each rank has
    some key heads and the value heads that share them. Small parameters are in float32, whatever
    checkpoints hold.

    With `interleaved` checkpoints hold the input projections key head by key head: `in_proj_qkvz`
    (query, key, values, output gates) and `in_proj_ba` (β, decay). Otherwise there are four
    tensors: `in_proj_qkv`, `in_proj_z`, `in_proj_b`, `in_proj_a`.
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
        super().__init__()
        whole, parallel = shape, where.parallel
        shape = replace(
            whole,
            num_key_heads=parallel.share("linear_num_key_heads", whole.num_key_heads),
            num_value_heads=parallel.share("linear_num_value_heads", whole.num_value_heads),
        )
        self.layer, self.shape, self.eps = layer, shape, norm_eps
        heads = shape.num_value_heads
        parts, gates, arrange = input_projections(shape, interleaved)
        # Which of the channels of checkpoints, and which of the value heads, are of this rank.
        self._channels: Shard | None = None
        self._heads: Shard | None = None
        shards: dict[str, Shard] = {}
        if parallel.size > 1:
            self._channels = parallel.shard(0, whole.keys, whole.keys, whole.values)
            self._heads = parallel.shard(0, whole.num_value_heads)
            shards = {name: parallel.shard(0, parallel.size * own) for name, own in parts.items()}
            if not interleaved:
                shards["in_proj_qkv"] = self._channels
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
        wide = partial(empty_parameter, device=where.device, dtype=torch.float32)
        self.conv_weight = empty_parameter(
            shape.channels, shape.conv_width, device=where.device, dtype=where.dtype
        )
        self.A_log, self.dt_bias = wide(heads), wide(heads)
        self.norm_weight = wide(shape.value_dim)
        self.cache_spec: CacheSpec | None = state_spec(shape, where.dtype)

    def forward(
        self,
        hidden: Tensor,
        residual: Tensor,
        cos_sin: Tensor | None,
        ctx: ForwardContext,
        outputs: OutputTokens | None,
    ) -> Stream:
        """Return residual + network(hidden) as `Mixer` says; `RowMetadata` says where states go."""
        shape, heads = self.shape, self.shape.num_value_heads
        mixed, gate, b, a = self.in_proj(hidden).split(
            [shape.channels, shape.values, heads, heads], dim=1
        )
        cache = ctx.cache(self.layer, StateCache)
        start, found = 0, []
        for rows in ctx.rows:
            tokens = slice(start, start := start + len(rows.positions))
            found.append(self._run(mixed[tokens], a[tokens], b[tokens], cache, rows))
        assert start == len(hidden)
        out = found[0] if len(found) == 1 else torch.cat(found)
        if outputs is not None:
            out, gate, residual = (x[outputs.index] for x in (out, gate, residual))
        normed = gated_rms_norm(out, gate, self.norm_weight, self.eps)
        return self.out_proj.add_to(residual, normed)

    def _run(self, x: Tensor, a: Tensor, b: Tensor, cache: StateCache, rows: RowMetadata) -> Tensor:
        """Compute a part's output [T, value heads, value_dim]; x is before the convolution."""
        window, matrix = cache.state["window"], cache.state["matrix"]
        if rows.width is not None:
            step = StepRows(rows.slots, cache.pending, cache.first, rows.width, cache.fold)
            return self._step(x, a, b, cache, step)
        own = _own_tokens(rows)
        if not own:
            return x.new_zeros((len(x), self.shape.num_value_heads, self.shape.value_dim))
        if own < len(x):
            out = self._run(x[:own], a[:own], b[:own], cache, _first_tokens(rows, own))
            return F.pad(out, (0, 0, 0, 0, 0, len(x) - own))
        prefill = PrefillRows(
            rows.slots, rows.positions, rows.starts, rows.snapshots, rows.query_lens
        )
        if rows.replay:
            return self._replay(x, a, b, cache, prefill, rows)
        x = causal_conv_prefill(x, self.conv_weight, window, prefill)
        tokens = self._inputs(x, a, b)
        if rows.replayed is None:
            return delta_prefill(tokens, matrix, prefill)
        return _read_again(tokens, matrix, prefill, rows.replayed)

    def _step(self, x: Tensor, a: Tensor, b: Tensor, cache: StateCache, step: StepRows) -> Tensor:
        """Compute a decode step's output."""
        window, inputs = cache.state["window"], cache.records["inputs"]
        x = causal_conv_step(x, self.conv_weight, window, inputs, step)
        records = DeltaRecords(*(cache.records[name] for name in DeltaRecords._fields))
        return delta_step(self._inputs(x, a, b), cache.state["matrix"], records, step)

    def _replay(
        self,
        x: Tensor,
        a: Tensor,
        b: Tensor,
        cache: StateCache,
        prefill: PrefillRows,
        rows: RowMetadata,
    ) -> Tensor:
        """Compute a prefill whose last tokens are read by `rows.replay`, the others in chunks."""
        assert rows.replayed is not None
        out = x.new_empty((len(x), self.shape.num_value_heads, self.shape.value_dim))
        (part, index), _ = _parts(prefill, rows.replayed)
        if len(index):
            window, matrix = cache.state["window"], cache.state["matrix"]
            convolved = causal_conv_prefill(x[index], self.conv_weight, window, part)
            out[index] = delta_prefill(self._inputs(convolved, a[index], b[index]), matrix, part)
        for index, slots, pending, first, width in rows.replay:
            step = StepRows(slots, pending, first, width, cache.fold)
            out[index] = self._step(x[index], a[index], b[index], cache, step)
        return out

    def _inputs(self, x: Tensor, a: Tensor, b: Tensor) -> DeltaInputs:
        return DeltaInputs(x, a, b, self.A_log, self.dt_bias)

    def weight_slots(self, path: str) -> Iterator[WeightSlot]:
        """Yield the slots of the parameters that are not in a linear layer."""
        conv = f"{path}.conv1d.weight"
        # Checkpoints have an axis of one input channel, as no channel sees another.
        yield WeightSlot(
            self.conv_weight,
            (conv,),
            (conv,),
            lambda tensors: tensors[conv].flatten(1),
            shard=self._channels,
        )
        yield WeightSlot.plain(f"{path}.A_log", self.A_log, shard=self._heads)
        yield WeightSlot.plain(f"{path}.dt_bias", self.dt_bias, shard=self._heads)
        yield WeightSlot.plain(f"{path}.norm.weight", self.norm_weight, dummy=1.0)


def _parts(rows: PrefillRows, replayed: tuple[int, ...]) -> list[tuple[PrefillRows, Tensor]]:
    """Divide a prefill into the tokens that are read in chunks, and the last `replayed` of each
    row, which are not; with their indices [n] int64."""
    lens = np.array(rows.lengths(), np.int64)
    is_again = are_replayed(lens.tolist(), replayed)
    first = rows._replace(query_lens=tuple((lens - np.array(replayed)).tolist()))
    found = []
    for part, chosen in (
        (first, ~is_again),
        (rows._replace(query_lens=replayed, snapshots=None), is_again),
    ):
        index = upload(np.flatnonzero(chosen.numpy()), torch.int64, rows.positions.device)
        starts = upload([0, *accumulate(part.lengths())], torch.int32, index.device)
        found.append((part._replace(positions=rows.positions[index], starts=starts), index))
    return found


def _read_again(
    tokens: DeltaInputs, matrix: Tensor, rows: PrefillRows, replayed: tuple[int, ...]
) -> Tensor:
    """Run a prefill in the forms that read its tokens first: the last `replayed` one by one."""
    out = tokens.qkv.new_empty((len(tokens.qkv), *matrix.shape[1:3]))
    forms = (delta_prefill, delta_replay)
    for run, (part, index) in zip(forms, _parts(rows, replayed), strict=True):
        if len(index):
            picked = DeltaInputs(
                tokens.qkv[index], tokens.a[index], tokens.b[index], tokens.a_log, tokens.dt_bias
            )
            out[index] = run(picked, matrix, part)
    return out


def _own_tokens(rows: RowMetadata) -> int:
    """Count a prefill's tokens that belong to rows; on a CPU a last row on scratch fills up."""
    count = len(rows.positions)
    if rows.positions.is_cuda or rows.query_lens is None or int(rows.slots[-1]):
        return count
    return count - rows.query_lens[-1]


def _first_tokens(rows: RowMetadata, count: int) -> RowMetadata:
    """Leave out the last row of a prefill, which has all tokens from `count` on."""
    assert rows.query_lens is not None
    return replace(
        rows,
        slots=rows.slots[:-1],
        positions=rows.positions[:count],
        starts=rows.starts[:-1],
        snapshots=None if rows.snapshots is None else rows.snapshots[:-1],
        query_lens=rows.query_lens[:-1],
        replayed=None if rows.replayed is None else rows.replayed[:-1],
    )
