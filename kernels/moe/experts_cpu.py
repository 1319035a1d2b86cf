"""`grouped_mlp` on a CPU: a token has the same bits whatever the other tokens of the batch are."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from batchgen.kernels.layers.activation import silu_and_mul_reference
from batchgen.kernels.layers.linear import MOST_ROWS, linear

_MOST_PAIRS = 2**14
"""Pairs of a token and an expert that are computed together. More take more memory, and at this
number 128 experts have 128 rows each, with which products are as fast as they get."""


class ExpertProducts(NamedTuple):
    """The weights of the products of one kind for all experts, and how they are computed.

    Attributes:
        weights: E weights [N, K], plain or from `pack_weight`.
        most_rows: what `linear` takes.
        pad_few: what `linear` takes.
    """

    weights: Sequence[Tensor]
    most_rows: int | None = MOST_ROWS
    pad_few: bool = True

    def __call__(self, x: Tensor, expert: int) -> Tensor:
        """Compute the product [R, N] of rows [R, K] with the weight of one expert."""
        return linear(x, self.weights[expert], None, self.most_rows, pad_few=self.pad_few)


def grouped_mlp_cpu(
    x: Tensor, gate_up: ExpertProducts, down: ExpertProducts, ids: Tensor, weights: Tensor
) -> Tensor:
    """`grouped_mlp` with the weights of each expert as `linear` takes them.

    A token's bits depend on that token alone, if `choose_product` found a way to compute both kinds
    of weights so, and `few_keep_bits` holds where few rows are not filled up.
    """
    most = max(_MOST_PAIRS // ids.shape[1], 1)
    parts = zip(x.split(most), ids.split(most), weights.split(most), strict=True)
    return torch.cat([_together(x, gate_up, down, ids, w) for x, ids, w in parts])


def _together(
    x: Tensor, gate_up: ExpertProducts, down: ExpertProducts, ids: Tensor, weights: Tensor
) -> Tensor:
    """`grouped_mlp_cpu` for few enough tokens to hold a row for each of their experts."""
    experts = ids.flatten().long()
    counts = experts.bincount(minlength=len(gate_up.weights)).tolist()
    # An id past those of the experts stands for one that is elsewhere, whose part is zero here.
    of_pairs = x.new_zeros((len(experts), x.shape[1]))
    for expert, pairs in enumerate(experts.argsort(stable=True).split(counts)):
        if len(pairs) and expert < len(gate_up.weights):
            inner = silu_and_mul_reference(gate_up(x[pairs // ids.shape[1]], expert))
            of_pairs[pairs] = down(inner, expert)
    total = torch.zeros(x.shape, dtype=torch.float32)
    of_slots = of_pairs.view(*ids.shape, x.shape[1]).unbind(1)
    for values, weight in zip(of_slots, weights.unbind(1), strict=True):
        # A fused product and sum may be rounded once for some elements and twice for others.
        total += values * weight.unsqueeze(1)
    return total.to(x.dtype)
