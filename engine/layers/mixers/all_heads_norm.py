"""Norms of queries or keys whose weights differ between heads. `Attention` uses them for models
that need more than one norm weight for all heads."""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor, nn

from batchgen.engine.layers.linear import empty_parameter
from batchgen.engine.layers.weight_slot import WeightSlot
from batchgen.engine.parallel.placement import Placement
from batchgen.engine.parallel.shard import Shard
from batchgen.engine.parallel.tensor_parallel import NORM_LANE
from batchgen.kernels.layers.rms_norm import rms_norm


class AllHeadsNorm(nn.Module):
    """x / sqrt(mean(x²) + eps) · weight, with the mean over the values of all heads of a token.

    Each rank has the weights of its heads.

    Args:
        order: [head_dim], the order of a head's values in this layer, as indices into a
            checkpoint's; None if equal.
    """

    def __init__(
        self,
        num_heads: int,
        *,
        head_dim: int,
        eps: float,
        order: Tensor | None,
        where: Placement,
    ) -> None:
        super().__init__()
        first, last = where.parallel.kv_heads(num_heads)  # this rank's heads, of queries or of keys
        self.eps, self.size, self.parallel = eps, num_heads * head_dim, where.parallel
        self._order, self._shard = order, None
        if where.parallel.size > 1:
            self._shard = Shard(0, self.size, ((first * head_dim, last * head_dim),))
        # With fewer heads than ranks, this many neighbouring ranks share a head.
        self.copies = max(1, where.parallel.size // num_heads)
        self.weight = empty_parameter(
            (last - first) * head_dim, device=where.device, dtype=where.dtype
        )

    def weight_slots(self, path: str) -> Iterator[WeightSlot]:
        """Yield the slot of the weight, which is 1 in a model without a checkpoint."""
        name, order = f"{path}.weight", self._order
        combine = None
        if order is not None:
            combine = lambda w: w[name].unflatten(0, (-1, len(order)))[:, order].flatten()  # noqa: E731
        yield WeightSlot(self.weight, (name,), (name,), combine, dummy=1.0, shard=self._shard)


class EachHeadNorm(nn.Module):
    """(x - mean(x)) / std(x) · weight, computed for each head separately, in float32 and without a
    bias.

    Every head has its own weights [head_dim], and each rank those of its heads. `order` is as for
    `AllHeadsNorm`.
    """

    def __init__(
        self,
        num_heads: int,
        *,
        head_dim: int,
        eps: float,
        order: Tensor | None,
        where: Placement,
    ) -> None:
        super().__init__()
        first, last = where.parallel.kv_heads(num_heads)
        self.eps, self._order, self._shard = eps, order, None
        if where.parallel.size > 1:
            self._shard = Shard(0, num_heads, ((first, last),))
        shape = last - first, head_dim
        self.weight = empty_parameter(*shape, device=where.device, dtype=torch.float32)
        self._ones = torch.ones(head_dim, dtype=torch.float32, device=where.device)

    def forward(self, x: Tensor) -> Tensor:
        """Normalise the heads of rows [T, heads · D]."""
        heads = x.float().unflatten(1, (-1, len(self._ones)))
        normed = rms_norm(heads, self._ones, self.eps, centred=True) * self.weight
        return normed.flatten(1).to(x.dtype)

    def weight_slots(self, path: str) -> Iterator[WeightSlot]:
        """Yield the slot of the weights [heads, D], which are 1 in a model without a checkpoint."""
        name, order = f"{path}.weight", self._order
        combine = None if order is None else lambda w: w[name][:, order]
        yield WeightSlot(self.weight, (name,), (name,), combine, dummy=1.0, shard=self._shard)


def normed_apart(qkv: Tensor, q_norm: EachHeadNorm, k_norm: EachHeadNorm) -> Tensor:
    """Normalise this rank's queries and keys, each head separately, in rows [T, q + k + v]. Values
    are unchanged."""
    sizes = [q_norm.weight.numel(), q_norm.weight.numel() + k_norm.weight.numel()]
    q, k, v = qkv.tensor_split(sizes, dim=1)
    return torch.cat((q_norm(q), k_norm(k), v), 1)


def normed_together(qkv: Tensor, q_norm: AllHeadsNorm, k_norm: AllHeadsNorm) -> Tensor:
    """Normalise this rank's queries and keys over all heads, in rows [T, q + k + v]. Values are
    unchanged. Ranks exchange the sums of squares of their heads, and add them in rank order."""
    sizes = [len(q_norm.weight), len(k_norm.weight)]
    q, k, v = qkv.tensor_split([sizes[0], sum(sizes)], dim=1)
    parallel = q_norm.parallel
    if parallel.size == 1:
        q, k = (rms_norm(x, n.weight, n.eps) for x, n in ((q, q_norm), (k, k_norm)))
        return torch.cat((q, k, v), 1)
    square_sums = [x.float().square().sum(-1, keepdim=True) for x in (q, k)]
    # Each rank sends two columns, of q and of k. `sums` has one column per rank for each of these.
    sums = parallel.gather(torch.cat(square_sums, 1), NORM_LANE).unflatten(1, (-1, 2)).unbind(2)
    normed = []
    for x, norm, parts in ((q, q_norm, sums[0]), (k, k_norm, sums[1])):
        total, *others = parts[:, :: norm.copies].split(1, 1)
        for part in others:
            total = total + part
        scaled = x.float() * torch.rsqrt(total / norm.size + norm.eps)
        normed.append((scaled.to(norm.weight.dtype) * norm.weight).to(x.dtype))
    return torch.cat((*normed, v), 1)
