"""The part of a tensor that one rank of tensor parallelism holds. Weight slots and the loader use
it."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor


class Shard(NamedTuple):
    """Ranges of one axis of a tensor."""

    axis: int  # the axis that is divided
    size: int  # the axis's length in the whole tensor
    # The first index of each range and the index after its last one, in ascending order.
    ranges: tuple[tuple[int, int], ...]

    def take(self, whole: Tensor) -> Tensor:
        """Return this shard of a whole tensor: a view for one range, else a copy. Of a
        memory-mapped tensor, only the shard's pages are read. Raises ValueError if the axis has
        another length."""
        if self.axis >= whole.ndim or whole.shape[self.axis] != self.size:
            raise ValueError(
                f"has shape {list(whole.shape)}, the configuration says {self.size} on axis "
                f"{self.axis}"
            )
        parts = [whole.narrow(self.axis, start, end - start) for start, end in self.ranges]
        return parts[0] if len(parts) == 1 else torch.cat(parts, self.axis)

    def whole_shape(self, shape: Sequence[int]) -> list[int]:
        """Return the shape of the whole tensor whose shard has this shape."""
        whole = list(shape)
        whole[self.axis] = self.size
        return whole

    def of_blocks(self, block: int) -> Shard:
        """Return this shard for an axis that has one entry per `block` entries of this axis. The
        last block may be smaller; ranges must begin at multiples of `block`."""
        assert all(start % block == 0 for start, _ in self.ranges)
        ranges = tuple((start // block, -(-end // block)) for start, end in self.ranges)
        return Shard(self.axis, -(-self.size // block), ranges)

    @property
    def length(self) -> int:
        """The length of the axis in the shard."""
        return sum(end - start for start, end in self.ranges)
