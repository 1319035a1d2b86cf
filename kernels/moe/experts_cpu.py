"""`grouped_mlp` on a CPU: a token has the same bits whatever the other tokens of the batch are."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from batchgen.kernels.layers.linear import MOST_ROWS, linear
from batchgen.kernels.moe.epilogues import PLAIN, Epilogues, gated

_GROUP_ROWS = 256
"""Rows of several experts that are gathered, activated and put back together. With few rows each,
calls of torch would cost more than products; more rows do not stay in a CPU's cache."""


class ExpertProducts(NamedTuple):
    """The weights of one product for all experts, and how `linear` computes it."""

    weights: Sequence[Tensor]  # E of [N, K], plain or from `pack_weight`
    most_rows: int | None = MOST_ROWS
    pad_few: bool = True
    bias: Tensor | None = None  # [E, N]

    def __call__(self, x: Tensor, expert: int) -> Tensor:
        """Compute the product [R, N] of rows [R, K] with the weight of one expert."""
        out = linear(x, self.weights[expert], None, self.most_rows, pad_few=self.pad_few)
        return out if self.bias is None else out.add_(self.bias[expert])


def grouped_mlp_cpu(
    x: Tensor,
    gate_up: ExpertProducts,
    down: ExpertProducts,
    ids: Tensor,
    weights: Tensor,
    epilogues: Epilogues = PLAIN,
) -> Tensor:
    """Compute `grouped_mlp` with each expert's weights as `linear` takes them.

    A token's bits depend on the token alone if `choose_product` found a way to compute both kinds
    of weights so, and `few_keep_bits` holds where few rows are not filled up.
    """
    experts, num_experts = ids.flatten().long(), len(gate_up.weights)
    # An id past the last expert stands for one that is elsewhere, whose part is zero here.
    counts = experts.bincount(minlength=num_experts)[:num_experts].tolist()
    order = experts.argsort(stable=True)
    weight_of_pair, first = weights.reshape(-1, 1), 0
    total, adapters = torch.zeros(x.shape, dtype=torch.float32), epilogues.adapters
    for group in _groups(counts):
        lengths = counts[group.start : group.stop]
        pairs = order[first : first + sum(lengths)]
        first += len(pairs)
        tokens = pairs // ids.shape[1]
        rows = x.index_select(0, tokens)
        wide = _by_expert(rows, gate_up, group, lengths)
        if adapters is not None:
            adapters.add_gate_up_(wide, rows, pairs)
        inner = gated(wide, epilogues.clamped, epilogues.function)
        outputs = _by_expert(inner, down, group, lengths)
        if adapters is not None:
            adapters.add_down_(outputs, inner, pairs)
        # One row after another is added: a token's parts in the order of their experts.
        total.index_add_(0, tokens, outputs * weight_of_pair.index_select(0, pairs))
    return total.to(x.dtype)


def _groups(counts: Sequence[int]) -> Iterator[range]:
    """Divide experts with `counts` rows each into groups of consecutive ones."""
    start = rows = 0
    for expert, count in enumerate(counts):
        if rows and rows + count > _GROUP_ROWS:
            yield range(start, expert)
            start, rows = expert, 0
        rows += count
    if rows:
        yield range(start, len(counts))


def _by_expert(
    rows: Tensor, products: ExpertProducts, experts: range, counts: Sequence[int]
) -> Tensor:
    """Multiply rows [R, K], of which each expert has its count, by its weight [N, K], to [R, N]."""
    pieces = zip(rows.split(counts), experts, strict=True)
    outputs = [products(piece, expert) for piece, expert in pieces if len(piece)]
    return outputs[0] if len(outputs) == 1 else torch.cat(outputs)
