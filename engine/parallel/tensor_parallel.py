"""Tensor parallelism: each layer's weights are divided between ranks, which run the same program.

The division is that of Shoeybi et al. 2019 (arXiv 1909.08053): heads and the columns between the
two products of an MLP are divided, so that each half of a layer needs one sum over all ranks. Each
rank has some of the experts as a whole.
"""

from __future__ import annotations

from typing import Any, NamedTuple, Protocol, TypeVar

import torch
from torch import Tensor

from batchgen.engine.parallel.shard import Shard
from batchgen.kernels.layers.rms_norm import rms_norm_of_sum
from batchgen.kernels.layers.shared_part import SharedPart

T = TypeVar("T")


class Collectives(Protocol):
    """What the ranks of one model do together. All ranks call the same in the same order."""

    def add_sum_norm(
        self, residual: Tensor | None, partial: Tensor, lane: int, weight: Tensor, eps: float
    ) -> tuple[Tensor, Tensor]:
        """Return what `PendingSum.normed` says; `residual` and `partial` may be overwritten."""

    def gather(self, x: Tensor, lane: int | None = None) -> Tensor:
        """Return what `TensorParallel.gather` says."""

    def least(self, value: int) -> int:
        """Return the least of all ranks' values."""

    def agree(self, value: Any) -> Any:
        """Return the value that rank 0 has, which pickle can send."""


class PendingSum(NamedTuple):
    """A residual stream to which a sum over all ranks is still to be added. The norm that reads the
    stream has it added (`RMSNorm.of_stream`), so that few tokens need one launch for both."""

    residual: Tensor | None  # [T, H], contiguous, the same on all ranks; None stands for zeros
    partial: Tensor  # [T, H], contiguous, this rank's part of the sum
    lane: int  # as for `TensorParallel.add_sum`
    collectives: Collectives  # how the ranks compute together

    def normed(self, weight: Tensor, eps: float) -> tuple[Tensor, Tensor]:
        """Add the sum and normalise the result, once. `weight` is [H], of the norm (`rms_norm`).
        Returns the normed stream [T, H] and the stream [T, H] itself, with the same bits on all
        ranks."""
        return self.collectives.add_sum_norm(self.residual, self.partial, self.lane, weight, eps)


class PendingParts:
    """A residual stream to which parts of a sum are still to be added.

    The norm that reads the stream adds them (`RMSNorm.of_stream`), in the launch in which it reads
    the stream anyway.

    Args:
        residual: [T, H], contiguous; overwritten with the sum then.
        parts: [P, T, H], the last axis contiguous; as large as a prefill's largest tensors.
        shared: what a shared expert adds besides, which is computed already; None adds nothing.
    """

    def __init__(self, residual: Tensor, parts: Tensor, shared: SharedPart | None = None) -> None:
        self.residual = residual
        self._added: tuple[Tensor, SharedPart | None] | None = (parts, shared)

    def take(self) -> tuple[Tensor, SharedPart | None]:
        """Return the parts and what is added besides, once, and hold them no longer. Whoever called
        a layer with this stream holds the stream until the layer has returned."""
        assert self._added is not None, "the parts have been added already"
        added, self._added = self._added, None
        return added


Stream = Tensor | PendingSum | PendingParts
"""A residual stream [T, H] between the parts of a model."""


def summed(stream: Stream) -> Tensor:
    """Return a residual stream [T, H] with the sums that are pending on it."""
    if isinstance(stream, Tensor):
        return stream
    # The norms themselves are not wanted.
    if isinstance(stream, PendingSum):
        ones = torch.ones_like(stream.partial[:1]).flatten()
        return stream.normed(ones, 1.0)[1]
    x, (parts, shared) = stream.residual, stream.take()
    rms_norm_of_sum(x, parts, shared, torch.ones_like(x[:1]).flatten(), 1.0)
    return x


class TensorParallel:
    """The ranks between which the weights of a model are divided, as one of them sees it.

    Args:
        collectives: how the ranks compute together. None with one rank, or where the sizes of a
            rank are wanted and nothing is computed.
    """

    def __init__(
        self, rank: int = 0, size: int = 1, collectives: Collectives | None = None
    ) -> None:
        assert 0 <= rank < size
        self.rank, self.size = rank, size
        self._collectives = collectives

    def share(self, what: str, number: int) -> int:
        """Return how many of a `number` of heads, experts or columns each rank has; `what` is their
        name in the model's configuration. Raises ValueError if it does not divide."""
        if number % self.size:
            raise ValueError(
                f"tensor_parallel={self.size} does not divide the model's {what} {number}: choose "
                f"{_divisors(number)}"
            )
        return number // self.size

    def kv_heads(self, number: int, what: str = "num_key_value_heads") -> tuple[int, int]:
        """Return the first key head of this rank and the one past its last. Where there are fewer
        heads than ranks, several ranks have the same head. Raises ValueError if neither number
        divides the other; `what` is the number's name in the model's configuration."""
        if number >= self.size:
            share = self.share(what, number)
            return self.rank * share, (self.rank + 1) * share
        if self.size % number:
            raise ValueError(
                f"tensor_parallel={self.size} is not a multiple of the model's {what} {number}: "
                f"choose {_divisors(number)}, or a multiple of {number}"
            )
        first = self.rank * number // self.size
        return first, first + 1

    def shard(self, axis: int, *sizes: int) -> Shard:
        """Divide an axis that consists of parts of these sizes, each of which is divided alone. The
        sizes must be multiples of the number of ranks."""
        start, ranges = 0, []
        for size in sizes:
            length = size // self.size
            assert length * self.size == size
            ranges.append((start + self.rank * length, start + (self.rank + 1) * length))
            start += size
        return Shard(axis, start, tuple(ranges))

    def add_sum(self, residual: Tensor | None, partial: Tensor, lane: int) -> PendingSum:
        """Add the sum over all ranks to the residual stream, which is the same on all of them. It
        is computed when the stream is read.

        Args:
            residual: [T, H], contiguous, which is then overwritten; None stands for zeros.
            partial: [T, H], contiguous, this rank's part of the sum, which may be overwritten.
            lane: which memory the ranks' parts go through. Two sums, one right behind the other,
                must have different lanes.
        """
        return PendingSum(residual, partial, lane, self._joined)

    def gather(self, x: Tensor, lane: int | None = None) -> Tensor:
        """Return the columns of all ranks side by side: [R, size · C] from each rank's [R, C].

        In a captured graph it needs a `lane` of its own (`add_sum`), which is used again only
        behind a sum.
        """
        if self.size == 1:
            return x
        return self._joined.gather(x, lane)

    def least(self, value: int) -> int:
        """Return the least value of all ranks."""
        return value if self._collectives is None else self._collectives.least(value)

    def agree(self, value: T) -> T:
        """Return what rank 0 gives. Whatever depends on clocks or memory goes through this, so that
        all ranks do the same."""
        if self._collectives is None:
            return value
        agreed: T = self._collectives.agree(value)
        return agreed

    @property
    def _joined(self) -> Collectives:
        assert self._collectives is not None, "the ranks are not connected"
        return self._collectives


ALONE = TensorParallel()
"""One rank that has all weights."""

MIXER_LANE, FEED_FORWARD_LANE, EXPERTS_LANE, EMBEDDING_LANE, NORM_LANE = range(5)
"""The lanes (`TensorParallel.add_sum`) of the two parts of a layer, which take turns, of experts
behind an MLP's sum, of the embedding before all layers, and of norms over the heads of all ranks,
each before its mixer's sum."""
FIXED_LANES = 5
"""The number of lanes."""


def _divisors(number: int) -> str:
    """Name the numbers of ranks that divide a number, up to 64."""
    divisors = [str(n) for n in range(1, min(number, 64) + 1) if number % n == 0]
    return ", ".join(divisors[:-1]) + (" or " if len(divisors) > 1 else "") + divisors[-1]
