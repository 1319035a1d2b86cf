"""A mixer with a causal convolution over the tokens of rows, whose newest inputs are part of the
rows' states. Base class of `Recurrence` and `ShortConv`.

A row's *state* sums up its tokens so far. A decode step leaves *records* of its tokens, which a
later step folds into the state, because only then it is known which drafts were accepted.
*Replayed* tokens are tokens of a prefill that are computed like decode steps, so that they get the
same bits.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from functools import partial
from itertools import accumulate
from typing import Generic, Protocol, Self, TypeVar

import numpy as np
import torch
from torch import Tensor, nn

from batchgen.engine.caches.forward_context import ForwardContext, RowMetadata
from batchgen.engine.caches.row_states import StateCache
from batchgen.engine.device.transfer import upload
from batchgen.engine.layers.linear import empty_parameter
from batchgen.engine.layers.weight_slot import WeightSlot
from batchgen.engine.parallel.placement import Placement
from batchgen.engine.parallel.shard import Shard
from batchgen.kernels.attention.metadata import are_replayed
from batchgen.kernels.linear_attention.causal_conv import causal_conv_prefill, causal_conv_step
from batchgen.kernels.linear_attention.state_rows import PrefillRows, StepRows


class TokenInputs(Protocol):
    """The inputs of a mixer for T tokens."""

    def take(self, tokens: slice | Tensor) -> Self:
        """Return the inputs of these tokens."""


Inputs = TypeVar("Inputs", bound=TokenInputs)


class ConvMixer(nn.Module, Generic[Inputs]):
    """A mixer that carries a state from token to token, and includes a causal convolution.

    This class goes through the parts of a forward. Subclasses compute prefills and decode steps;
    their states have a `window`, and their records `inputs`, for the convolution.

    Args:
        shard: this rank's channels of the checkpoint's.
        arrange: reorders the checkpoint's channels.
    """

    with_silu = True
    """Whether the convolution is followed by SiLU."""

    def __init__(
        self,
        layer: int,
        channels: int,
        width: int,  # the number of tokens in the convolution's window, the current one included
        *,
        conv_bias: bool,
        shard: Shard | None,
        arrange: Callable[[Tensor], Tensor] | None = None,
        where: Placement,
    ) -> None:
        super().__init__()
        self.layer, self._channels, self._arrange = layer, shard, arrange
        empty = partial(empty_parameter, device=where.device, dtype=where.dtype)
        self.conv_weight = empty(channels, width)
        self.conv_bias = empty(channels) if conv_bias else None

    def prefill(
        self,
        tokens: Inputs,
        cache: StateCache,
        rows: PrefillRows,
        replayed: tuple[int, ...] | None = None,
    ) -> Tensor:
        """Compute a prefill's output. The last `replayed` tokens of each row are computed as in
        decode steps."""
        raise NotImplementedError

    def step(self, tokens: Inputs, cache: StateCache, rows: StepRows) -> Tensor:
        """Compute a decode step's output."""
        raise NotImplementedError

    def empty(self, tokens: Inputs) -> Tensor:
        """Allocate the outputs of these tokens."""
        raise NotImplementedError

    def weight_slots(self, path: str) -> Iterator[WeightSlot]:
        """Yield the slots of the convolution's parameters."""
        for name, parameter in (("weight", self.conv_weight), ("bias", self.conv_bias)):
            if parameter is not None:
                source = (f"{path}.conv1d.{name}",)
                yield WeightSlot(parameter, source, source, self._in_order, shard=self._channels)

    def _in_order(self, tensors: Mapping[str, Tensor]) -> Tensor:
        """Return the channels' only tensor, [C, K] or [C], reordered. Checkpoints' weights have an
        additional axis of length 1, because channels are independent."""
        (values,) = tensors.values()
        values = values.flatten(1) if values.ndim > 1 else values
        return values if self._arrange is None else self._arrange(values)

    def convolved(self, x: Tensor, cache: StateCache, rows: PrefillRows | StepRows) -> Tensor:
        """Convolve the tokens x [T, C] of rows, and advance the rows' windows."""
        window = cache.state["window"]
        if isinstance(rows, PrefillRows):
            return causal_conv_prefill(
                x, self.conv_weight, self.conv_bias, window, rows, with_silu=self.with_silu
            )
        inputs = cache.records["inputs"]
        return causal_conv_step(
            x, self.conv_weight, self.conv_bias, window, inputs, rows, with_silu=self.with_silu
        )

    def run(self, tokens: Inputs, ctx: ForwardContext) -> Tensor:
        """Compute the outputs of all tokens of a forward. States are read and written as
        `RowMetadata` says."""
        cache = ctx.cache(self.layer, StateCache)
        start, parts = 0, []
        for rows in ctx.rows:
            part = slice(start, start := start + len(rows.positions))
            parts.append(self._run(tokens.take(part), cache, rows))
        return parts[0] if len(parts) == 1 else torch.cat(parts)

    def _run(self, tokens: Inputs, cache: StateCache, rows: RowMetadata) -> Tensor:
        """Compute the output of one part."""
        count = len(rows.positions)
        if rows.width is not None:
            step = StepRows(rows.slots, cache.pending, cache.first, rows.width, cache.fold)
            return self.step(tokens, cache, step)
        indices = _own_tokens(rows)
        if not indices:
            return self.empty(tokens).zero_()
        if indices < count:
            out = self._run(tokens.take(slice(indices)), cache, _first_tokens(rows, indices))
            return torch.cat([out, out.new_zeros((count - indices, *out.shape[1:]))])
        prefill = PrefillRows(
            rows.slots, rows.positions, rows.starts, rows.snapshots, rows.query_lens
        )
        if rows.replay:
            return self._replay(tokens, cache, prefill, rows)
        return self.prefill(tokens, cache, prefill, rows.replayed)

    def _replay(
        self, tokens: Inputs, cache: StateCache, prefill: PrefillRows, rows: RowMetadata
    ) -> Tensor:
        """Compute a prefill in which the last tokens of rows are computed by the decode steps
        `rows.replay`."""
        assert rows.replayed is not None
        out = self.empty(tokens)
        (part, index), _ = replay_parts(prefill, rows.replayed)
        if len(index):
            out[index] = self.prefill(tokens.take(index), cache, part)
        for index, slots, pending, first, width in rows.replay:
            step = StepRows(slots, pending, first, width, cache.fold)
            out[index] = self.step(tokens.take(index), cache, step)
        return out


def replay_parts(rows: PrefillRows, replayed: tuple[int, ...]) -> list[tuple[PrefillRows, Tensor]]:
    """Split a prefill into the tokens that are computed in chunks, and the last `replayed` tokens
    of each row. Each part is returned with the indices [n] int64 of its tokens."""
    lens = np.array(rows.lengths(), np.int64)
    is_replayed = are_replayed(lens.tolist(), replayed)
    first = rows._replace(query_lens=tuple((lens - np.array(replayed)).tolist()))
    parts = []
    for part, is_in_part in (
        (first, ~is_replayed),
        (rows._replace(query_lens=replayed, snapshots=None), is_replayed),
    ):
        index = upload(np.flatnonzero(is_in_part.numpy()), torch.int64, rows.positions.device)
        starts = upload([0, *accumulate(part.lengths())], torch.int32, index.device)
        parts.append((part._replace(positions=rows.positions[index], starts=starts), index))
    return parts


def _own_tokens(rows: RowMetadata) -> int:
    """Return how many of a prefill's tokens belong to rows. On a CPU the last row may be padding on
    the scratch slot."""
    count = len(rows.positions)
    # Only slot 0 is scratch. On a GPU the host would have to wait for the slots.
    if rows.positions.is_cuda or rows.query_lens is None or int(rows.slots[-1]):
        return count
    return count - rows.query_lens[-1]


def _first_tokens(rows: RowMetadata, count: int) -> RowMetadata:
    """Return the prefill without its last row, which has all tokens from `count` on."""
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
