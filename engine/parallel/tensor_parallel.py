"""Tensor parallelism: each layer's weights are divided among ranks, which run the same program.

The division is that of Shoeybi et al. 2019 (arXiv 1909.08053): heads, and the intermediate columns
of MLPs, are divided, so that each half of a layer needs one sum over all ranks. Experts are not
divided; each rank has some of them.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple, Protocol, TypeVar

import torch
from torch import Tensor

from batchgen.engine.parallel.shard import Shard
from batchgen.kernels.layers.post_norm import Term, add_post_norm
from batchgen.kernels.layers.rms_norm import rms_norm_of_sum
from batchgen.kernels.layers.shared_part import SharedPart

T = TypeVar("T")


class Collectives(Protocol):
    """The operations of all ranks together. All ranks call the same operations in the same
    order."""

    def add_sum_norm(
        self, residual: Tensor | None, partial: Tensor, lane: int, weight: Tensor, eps: float
    ) -> tuple[Tensor, Tensor]:
        """Compute `PendingSum.normed`; `residual` and `partial` may be overwritten."""

    def gather(self, x: Tensor, lane: int | None = None) -> Tensor:
        """Compute `TensorParallel.gather`."""

    def least(self, value: int) -> int:
        """Return the smallest of all ranks' values."""

    def agree(self, value: Any) -> Any:
        """Return rank 0's value, which pickle must be able to send."""


class PendingSum(NamedTuple):
    """A residual stream with a sum over all ranks still to be added. The norm that reads the stream
    adds it (`RMSNorm.of_stream`), so that for few tokens one launch does both."""

    residual: Tensor | None  # [T, H], contiguous, the same on all ranks; None stands for zeros
    partial: Tensor  # [T, H], contiguous, this rank's part of the sum
    lane: int  # as for `TensorParallel.add_sum`
    collectives: Collectives  # how the ranks compute together

    def normed(self, weight: Tensor, eps: float) -> tuple[Tensor, Tensor]:
        """Add the sum and normalise the result. May be called once.

        Args:
            weight: [H], the weight of the norm (`rms_norm`).

        Returns:
            The normed stream and the stream itself, both [T, H], with the same bits on all ranks.
        """
        return self.collectives.add_sum_norm(self.residual, self.partial, self.lane, weight, eps)


class PendingParts:
    """A residual stream with parts of a sum still to be added. The norm that reads the stream adds
    them, in the same launch (`RMSNorm.of_stream`).

    Args:
        residual: [T, H], contiguous; overwritten with the sum. A dtype stands for zeros of it.
        parts: [P, T, H], the last axis contiguous; as large as a prefill's largest tensors.
        shared: the result of a shared expert, which is added as well; None adds nothing.
    """

    def __init__(
        self, residual: Tensor | torch.dtype, parts: Tensor, shared: SharedPart | None = None
    ) -> None:
        self.residual = residual
        self._added: tuple[Tensor, SharedPart | None] | None = (parts, shared)

    @property
    def rows(self) -> Tensor:
        """The residual; zeros if there is none."""
        if isinstance(self.residual, Tensor):
            return self.residual
        assert self._added is not None
        parts = self._added[0]
        return torch.zeros(parts.shape[1:], dtype=self.residual, device=parts.device)

    def take(self) -> tuple[Tensor, SharedPart | None]:
        """Return and release the parts and the shared expert's result. May be called once. The
        caller of a layer with this stream holds the stream until the layer has returned."""
        assert self._added is not None, "the parts have been added already"
        added, self._added = self._added, None
        return added


class PendingNorm:
    """A residual stream to which normed results of a layer's part are still to be added. The norms
    that read the stream next are computed in the same launch (`add_post_norm`).

    Args:
        residual: [T, H], contiguous; overwritten with the sum. None: the terms are not for a
            residual stream, but for the norm that follows (`RMSNorm.add_to`).
        terms, weight, scalar: as for `add_post_norm`.
        eps: of all norms in the sum.
    """

    def __init__(
        self,
        residual: Tensor | None,
        terms: Sequence[Term],
        eps: float,
        *,
        weight: Tensor | None = None,
        scalar: Tensor | None = None,
    ) -> None:
        self._residual, self.eps, self._weight, self._scalar = residual, eps, weight, scalar
        self._terms: Sequence[Term] | None = terms

    def take(self) -> Sequence[Term]:
        """Return and release the terms. May be called once, as `PendingParts.take`."""
        assert self._terms is not None, "the terms have been added already"
        terms, self._terms = self._terms, None
        return terms

    def finish(self, readers: Sequence[Tensor] = ()) -> tuple[Tensor, list[Tensor]]:
        """Add the terms. Returns the stream, and its norms with the weights `readers` (up to
        `MOST_READERS`). May be called once."""
        assert self._residual is not None, "a norm of the terms is still to be computed"
        return add_post_norm(
            self._residual, self.take(), self.eps, self._weight, self._scalar, readers
        )


Stream = Tensor | PendingSum | PendingParts | PendingNorm
"""A residual stream [T, H] between the parts of a model."""


def summed(stream: Stream) -> Tensor:
    """Return a residual stream [T, H] with its pending sums added."""
    if isinstance(stream, Tensor):
        return stream
    if isinstance(stream, PendingNorm):
        return stream.finish()[0]
    # The norms are computed as well, but not used.
    if isinstance(stream, PendingSum):
        ones = torch.ones_like(stream.partial[:1]).flatten()
        return stream.normed(ones, 1.0)[1]
    x, (parts, shared) = stream.rows, stream.take()
    rms_norm_of_sum(x, parts, shared, torch.ones_like(x[:1]).flatten(), 1.0)
    return x


class TensorParallel:
    """The ranks that divide the weights of a model, as seen by one of them.

    Args:
        collectives: the operations between ranks. None with one rank, or where only the sizes of a
            rank's weights are needed and nothing is computed.
    """

    def __init__(
        self, rank: int = 0, size: int = 1, collectives: Collectives | None = None
    ) -> None:
        assert 0 <= rank < size
        self.rank, self.size = rank, size
        self._collectives = collectives

    def share(self, what: str, number: int) -> int:
        """Return how many of `number` heads, experts or columns each rank has. Raises ValueError if
        the number cannot be divided; `what` is its name in the model's configuration."""
        if number % self.size:
            raise ValueError(
                f"tensor_parallel={self.size} does not divide the model's {what} {number}: choose "
                f"{_divisors(number)}"
            )
        return number // self.size

    def kv_heads(self, number: int, what: str = "num_key_value_heads") -> tuple[int, int]:
        """Return the first key head of this rank and the one after its last. With fewer heads than
        ranks, several ranks share a head. Raises ValueError if neither number divides the other;
        `what` is the number's name in the model's configuration."""
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
        """Divide an axis that is a concatenation of parts of these sizes, each of which is divided
        separately. The sizes must be multiples of the number of ranks."""
        start, ranges = 0, []
        for size in sizes:
            length = size // self.size
            assert length * self.size == size
            ranges.append((start + self.rank * length, start + (self.rank + 1) * length))
            start += size
        return Shard(axis, start, tuple(ranges))

    def add_sum(self, residual: Tensor | None, partial: Tensor, lane: int) -> PendingSum:
        """Add the sum of `partial` over all ranks to the residual stream. The sum is computed when
        the stream is read.

        Args:
            residual: [T, H], contiguous, equal on all ranks; overwritten later. None stands for
                zeros.
            partial: [T, H], contiguous, this rank's summand; may be overwritten.
            lane: the memory through which the ranks exchange summands. Two consecutive sums must
                have different lanes.
        """
        return PendingSum(residual, partial, lane, self._joined)

    def gather(self, x: Tensor, lane: int | None = None) -> Tensor:
        """Concatenate the columns of all ranks: [R, size · C] from each rank's [R, C]. In a
        captured graph it needs its own `lane` (`add_sum`), which must not be reused before a
        sum."""
        if self.size == 1:
            return x
        return self._joined.gather(x, lane)

    def least(self, value: int) -> int:
        """Return the smallest of all ranks' values."""
        return value if self._collectives is None else self._collectives.least(value)

    def agree(self, value: T) -> T:
        """Return rank 0's value. Everything that depends on clocks or memory goes through this, so
        that all ranks do the same."""
        if self._collectives is None:
            return value
        agreed: T = self._collectives.agree(value)
        return agreed

    @property
    def _joined(self) -> Collectives:
        assert self._collectives is not None, "the ranks are not connected"
        return self._collectives


ALONE = TensorParallel()
"""A single rank that has all weights."""

MIXER_LANE, FEED_FORWARD_LANE, EXPERTS_LANE, EMBEDDING_LANE, NORM_LANE = range(5)
"""The lanes (`TensorParallel.add_sum`) of the two parts of a layer, which alternate; of experts
after an MLP's sum; of the embedding, before all layers; and of norms over the heads of all ranks,
each before its mixer's sum."""
FIXED_LANES = 5
"""The number of lanes."""


def _divisors(number: int) -> str:
    """List the numbers up to 64 that divide `number`, for messages."""
    divisors = [str(n) for n in range(1, min(number, 64) + 1) if number % n == 0]
    return ", ".join(divisors[:-1]) + (" or " if len(divisors) > 1 else "") + divisors[-1]
