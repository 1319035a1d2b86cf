"""The weight of latent attention that expands latents to keys and values.

A *latent* is the short vector that such a layer caches for each token, instead of the keys and
values of all heads (`mla.py`).
"""

from __future__ import annotations

from collections.abc import Iterator

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from batchgen.engine.layers.cpu_products import CPUProducts
from batchgen.engine.layers.feed_forward.experts import packed_products
from batchgen.engine.layers.linear import empty_parameter
from batchgen.engine.layers.weight_slot import WeightSlot
from batchgen.engine.parallel.placement import Placement
from batchgen.kernels.moe.experts_cpu import ExpertProducts


class KVExpansion(nn.Module):
    """The linear map from a latent to the keys and values of all heads. Each rank has some of the
    heads. The attention kernels call it through the protocol `Expansion` (`kernels/mla`).

    Args:
        key_size: N, the part of a head's key that is not rotated.
        latent_size: L. value_size: V.
    """

    weight: Tensor

    def __init__(
        self,
        num_heads: int,
        latent_size: int,
        key_size: int,
        value_size: int,
        *,
        where: Placement,
    ) -> None:
        super().__init__()
        self._key_size, self.value_size = key_size, value_size
        rows = num_heads * (key_size + value_size)
        self._shard = where.parallel.shard(0, rows) if where.parallel.size > 1 else None
        shape = (num_heads // where.parallel.size, key_size + value_size, latent_size)
        self.weight = empty_parameter(*shape, device=where.device, dtype=where.dtype)
        # On a CPU after `pack`: the products of `absorb` and of `values`.
        self._packed: tuple[ExpertProducts, ExpertProducts] | None = None

    def absorb(self, q: Tensor) -> Tensor:
        """Turn queries of keys [T, heads, N] into queries of latents [T, heads, L]."""
        if self._packed is not None:
            return _by_head(q, self._packed[0])
        return _multiply_heads(q, self.weight[:, : self._key_size])

    def values(self, mixed: Tensor, out: Tensor | None = None) -> Tensor:
        """Turn weighted sums of latents [T, heads, L] into weighted sums of values [T, heads,
        V]."""
        if self._packed is None:
            return _multiply_heads(mixed, self.weight[:, self._key_size :].transpose(1, 2), out)
        values = _by_head(mixed, self._packed[1])
        return values if out is None else out.copy_(values)

    def expand(self, latents: Tensor) -> Tensor:
        """Expand latents [S, L] to keys and values [S, heads, N + V]. Not possible after `pack`."""
        expanded: Tensor = F.linear(latents, self.weight.flatten(0, 1))
        return expanded.view(-1, *self.weight.shape[:2])

    def weight_slots(self, path: str) -> Iterator[WeightSlot]:
        """Yield the slot of the weight, which checkpoints hold as [heads · (N + V), L]."""
        rows = self.weight.view(-1, self.weight.shape[2])
        yield WeightSlot.plain(f"{path}.weight", rows, shard=self._shard)

    def pack(self, products: CPUProducts) -> None:
        """Convert the loaded weight to the layout for this CPU, as `Linear.pack` does."""
        if self._packed is not None or self.weight.device.type != "cpu":
            return
        keys, values = self.weight.split([self._key_size, self.value_size], 1)
        self._packed = (
            packed_products(keys.transpose(1, 2).contiguous(), products),
            packed_products(values.contiguous(), products),
        )
        del self.weight


def _by_head(x: Tensor, products: ExpertProducts) -> Tensor:
    """Multiply each head of x [T, heads, K] by its packed weight. Returns [T, heads, N]."""
    return torch.stack([products(rows, head) for head, rows in enumerate(x.unbind(1))], 1)


def _multiply_heads(x: Tensor, weights: Tensor, out: Tensor | None = None) -> Tensor:
    """Multiply each head of x [T, heads, K] by its matrix [K, N]. The result is contiguous on a
    GPU."""
    if out is None and not x.is_cuda:
        return torch.bmm(x.transpose(0, 1), weights).transpose(0, 1)
    if out is None:
        out = x.new_empty((len(x), len(weights), weights.shape[2]))
    torch.bmm(x.transpose(0, 1), weights, out=out.transpose(0, 1))
    return out
