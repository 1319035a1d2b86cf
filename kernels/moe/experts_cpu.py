"""`grouped_mlp` on a CPU: a token has the same bits whatever the other tokens of the batch are.

A *slot* is one of the k experts that a token chose: slot t·k + j is choice j of token t. Slots are
sorted by expert, and consecutive experts are computed in groups.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from batchgen.kernels.layers.linear import MOST_ROWS, linear
from batchgen.kernels.moe.epilogues import PLAIN, Epilogues, gated

_GROUP_ROWS = 256
"""The most rows of several experts that are gathered, activated and added together. With fewer,
calls of torch would cost more than the products; with more, rows do not stay in a CPU's cache."""


class ExpertProducts(NamedTuple):
    """The weights of one product for all experts, and how `layers.linear` computes it."""

    weights: Sequence[Tensor]  # E of [N, K], plain or from `pack_weight`
    most_rows: int | None = MOST_ROWS  # an argument of `linear`
    pad_few: bool = True  # an argument of `linear`
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
    """Compute `grouped_mlp` of tokens x [T, H] with ids and weights [T, k]. Returns [T, H].

    A token's bits depend on the token alone if `linear` computes each row of both products so,
    which `layers.cpu_product` finds out.
    """
    experts, num_experts = ids.flatten().long(), len(gate_up.weights)
    # An id past the last expert stands for one that is elsewhere, whose part is zero here.
    counts = experts.bincount(minlength=num_experts)[:num_experts].tolist()
    order = experts.argsort(stable=True)
    slot_weights, first = weights.reshape(-1, 1), 0
    total, adapters = torch.zeros(x.shape, dtype=torch.float32), epilogues.adapters
    for group in _groups(counts):
        lengths = counts[group.start : group.stop]
        slots = order[first : first + sum(lengths)]
        first += len(slots)
        tokens = slots // ids.shape[1]
        rows = x.index_select(0, tokens)
        wide = _by_expert(rows, gate_up, group, lengths)
        if adapters is not None:
            adapters.add_gate_up_(wide, rows, slots)
        inner = gated(wide, epilogues.clamped, epilogues.function)
        outputs = _by_expert(inner, down, group, lengths)
        if adapters is not None:
            adapters.add_down_(outputs, inner, slots)
        # `index_add_` adds row by row, so a token's results are added in the order of experts.
        total.index_add_(0, tokens, outputs * slot_weights.index_select(0, slots))
    return total.to(x.dtype)


def _groups(counts: Sequence[int]) -> Iterator[range]:
    """Divide experts with `counts` [E] rows into groups of consecutive experts with at most
    `_GROUP_ROWS` rows together, or of one expert."""
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
    """Multiply rows [R, K] by the weights [N, K] of their experts: the first `counts[0]` rows by
    that of the first of `experts`, and so on. Return [R, N]."""
    pieces = zip(rows.split(counts), experts, strict=True)
    outputs = [products(piece, expert) for piece, expert in pieces if len(piece)]
    return outputs[0] if len(outputs) == 1 else torch.cat(outputs)
