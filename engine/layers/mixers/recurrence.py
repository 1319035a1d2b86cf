"""A recurrence with a matrix as its state: what gated delta networks and Mamba2 share."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from functools import partial
from itertools import accumulate

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from batchgen.engine.caches.cache_specs import CacheSpec
from batchgen.engine.caches.forward_context import ForwardContext, RowMetadata
from batchgen.engine.caches.row_states import StateCache
from batchgen.engine.device.transfer import upload
from batchgen.engine.layers.linear import empty_parameter
from batchgen.engine.layers.mixers.delta_shape import DeltaShape, state_spec
from batchgen.engine.layers.weight_slot import WeightSlot
from batchgen.engine.parallel.placement import Placement
from batchgen.engine.parallel.shard import Shard
from batchgen.kernels.attention.metadata import are_replayed
from batchgen.kernels.linear_attention.causal_conv import causal_conv_prefill, causal_conv_step
from batchgen.kernels.linear_attention.delta_inputs import DeltaInputs, DeltaRecords
from batchgen.kernels.linear_attention.delta_replay import delta_replay
from batchgen.kernels.linear_attention.delta_rule import delta_prefill, delta_step
from batchgen.kernels.linear_attention.state_rows import PrefillRows, StepRows


class Recurrence(nn.Module):
    """The causal convolution and the recurrence of a mixer, whose state is a matrix for each value
    head and row. Subclasses project into it and out of it.

    `shape` is that of this rank's heads; `channels` and `heads` say which of a checkpoint's
    channels of the convolution and value heads they are, and `arrange` puts the channels in the
    order of queries, keys and values. Small parameters are in float32, whatever checkpoints hold.
    """

    def __init__(
        self,
        layer: int,
        shape: DeltaShape,
        *,
        channels: Shard | None,
        heads: Shard | None,
        arrange: Callable[[Tensor], Tensor] | None = None,
        conv_bias: bool = False,
        skips: bool = False,  # a token's value is added to its output, times a number of the head
        where: Placement,
    ) -> None:
        super().__init__()
        self.layer, self.shape = layer, shape
        self._channels, self._heads, self._arrange = channels, heads, arrange
        wide = partial(empty_parameter, device=where.device, dtype=torch.float32)
        own = partial(empty_parameter, device=where.device, dtype=where.dtype)
        self.conv_weight = own(shape.channels, shape.conv_width)
        self.conv_bias = own(shape.channels) if conv_bias else None
        self.A_log, self.dt_bias = wide(shape.num_value_heads), wide(shape.num_value_heads)
        self.D = wide(shape.num_value_heads) if skips else None
        self.cache_spec: CacheSpec | None = state_spec(shape, where.dtype)

    def weight_slots(self, path: str) -> Iterator[WeightSlot]:
        """Yield the slots of the parameters that are not in a linear layer or a norm."""
        for name, parameter in (("weight", self.conv_weight), ("bias", self.conv_bias)):
            if parameter is not None:
                source = (f"{path}.conv1d.{name}",)
                yield WeightSlot(parameter, source, source, self._in_order, shard=self._channels)
        for name, parameter in (("A_log", self.A_log), ("dt_bias", self.dt_bias), ("D", self.D)):
            if parameter is not None:
                yield WeightSlot.plain(f"{path}.{name}", parameter, shard=self._heads)

    def _in_order(self, tensors: Mapping[str, Tensor]) -> Tensor:
        """Return the channels' only tensor, [C, K] or [C]. Weights in checkpoints have an axis of
        one input channel, as no channel sees another."""
        (values,) = tensors.values()
        values = values.flatten(1) if values.ndim > 1 else values
        return values if self._arrange is None else self._arrange(values)

    def mix(self, x: Tensor, a: Tensor, b: Tensor | None, ctx: ForwardContext) -> Tensor:
        """Compute the outputs [T, value heads, value_dim] of tokens as `DeltaInputs` has them, but
        with x before the convolution; `RowMetadata` says where states go."""
        tokens = DeltaInputs(x, a, b, self.A_log, self.dt_bias, self.D)
        cache = ctx.cache(self.layer, StateCache)
        start, parts = 0, []
        for rows in ctx.rows:
            own = slice(start, start := start + len(rows.positions))
            parts.append(self._run(tokens.take(own), cache, rows))
        assert start == len(x)
        return parts[0] if len(parts) == 1 else torch.cat(parts)

    def _run(self, tokens: DeltaInputs, cache: StateCache, rows: RowMetadata) -> Tensor:
        """Compute a part's output."""
        count = len(tokens.qkv)
        if rows.width is not None:
            step = StepRows(rows.slots, cache.pending, cache.first, rows.width, cache.fold)
            return self._step(tokens, cache, step)
        own = _own_tokens(rows)
        if not own:
            return self._empty(tokens).zero_()
        if own < count:
            out = self._run(tokens.take(slice(own)), cache, _first_tokens(rows, own))
            return F.pad(out, (0, 0, 0, 0, 0, count - own))
        prefill = PrefillRows(
            rows.slots, rows.positions, rows.starts, rows.snapshots, rows.query_lens
        )
        if rows.replay:
            return self._replay(tokens, cache, prefill, rows)
        tokens = self._convolved(tokens, cache, prefill)
        if rows.replayed is None:
            return delta_prefill(tokens, cache.state["matrix"], prefill)
        out, forms = self._empty(tokens), (delta_prefill, delta_replay)
        for run, (part, index) in zip(forms, _parts(prefill, rows.replayed), strict=True):
            if len(index):
                out[index] = run(tokens.take(index), cache.state["matrix"], part)
        return out

    def _convolved(self, tokens: DeltaInputs, cache: StateCache, rows: PrefillRows) -> DeltaInputs:
        window = cache.state["window"]
        x = causal_conv_prefill(tokens.qkv, self.conv_weight, self.conv_bias, window, rows)
        return tokens._replace(qkv=x)

    def _step(self, tokens: DeltaInputs, cache: StateCache, step: StepRows) -> Tensor:
        """Compute a decode step's output."""
        window, inputs = cache.state["window"], cache.records["inputs"]
        x = causal_conv_step(tokens.qkv, self.conv_weight, self.conv_bias, window, inputs, step)
        records = DeltaRecords(*(cache.records[name] for name in DeltaRecords._fields))
        return delta_step(tokens._replace(qkv=x), cache.state["matrix"], records, step)

    def _replay(
        self, tokens: DeltaInputs, cache: StateCache, prefill: PrefillRows, rows: RowMetadata
    ) -> Tensor:
        """Compute a prefill whose last tokens are read by `rows.replay`, the others in chunks."""
        assert rows.replayed is not None
        out = self._empty(tokens)
        (part, index), _ = _parts(prefill, rows.replayed)
        if len(index):
            convolved = self._convolved(tokens.take(index), cache, part)
            out[index] = delta_prefill(convolved, cache.state["matrix"], part)
        for index, slots, pending, first, width in rows.replay:
            step = StepRows(slots, pending, first, width, cache.fold)
            out[index] = self._step(tokens.take(index), cache, step)
        return out

    def _empty(self, tokens: DeltaInputs) -> Tensor:
        shape = self.shape
        return tokens.qkv.new_empty((len(tokens.qkv), shape.num_value_heads, shape.value_dim))


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
