"""The experts of a mixture: gated MLPs, of which each token goes through a few."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from batchgen.kernels.layers.activation import silu_and_mul_reference
from batchgen.kernels.layers.shared_part import SharedPart, add_up
from batchgen.kernels.moe.experts_cpu import ExpertProducts, grouped_mlp_cpu
from batchgen.kernels.moe.experts_triton import grouped_mlp_triton, grouped_parts_triton


def grouped_mlp(
    x: Tensor,
    gate_up: Tensor,
    down: Tensor,
    ids: Tensor,
    weights: Tensor,
    residual: Tensor | None = None,
    *,
    shared: Callable[[], SharedPart] | None = None,
    num_routed: int | None = None,
) -> Tensor:
    """Compute y_t = Σ_j w_tj · down_e · (silu(gate_e · x_t) · (up_e · x_t)) with e = ids[t, j].

    The sum over j is in float32, and in an order that depends on the token alone: that of the k
    columns of `ids` on a GPU, where the same call gives the same bits every time, and that of the
    experts on a CPU.

    Args:
        x: [T, H], the tokens.
        gate_up: [E, 2·I, H], the weights of each expert: the I rows of gate and then those of up.
            On a GPU they may be in panels (`panels.py`), as those of down then are.
        down: [E, H, I].
        ids: [T, k] int32, the experts of each token, all in [0, E), or in [0, E] if `num_routed` is
            more than E: then the id E stands for an expert that is elsewhere, and is left out.
        weights: [T, k] float32. A NaN here or in x stays in its own row.
        residual: [T, H], dtype of x, contiguous, to which the result is added in place; None adds
            it to nothing.
        shared: returns what the shared expert adds besides; called last, and once. None adds
            nothing. On a GPU all is summed in float32 and rounded once.
        num_routed: from how many experts those of a token were chosen; None means E.

    Returns:
        [T, H], dtype of x: a new tensor, or `residual`.
    """
    if x.is_cuda:
        return grouped_mlp_triton(
            x, gate_up, down, ids, weights, residual, shared=shared, num_routed=num_routed
        )
    products = ExpertProducts(gate_up.unbind()), ExpertProducts(down.unbind())
    return add_up(grouped_mlp_cpu(x, *products, ids, weights), residual, shared)


def grouped_parts(
    x: Tensor, gate_up: Tensor, down: Tensor, ids: Tensor, weights: Tensor
) -> Tensor | None:
    """Compute what `grouped_mlp` adds up: [k, T, H], dtype of x, the last axis contiguous; None
    where parts are not computed, which is on a CPU and without tokens."""
    if not x.is_cuda or not len(x):
        return None
    parts = grouped_parts_triton(x, gate_up, down, ids, weights)
    return parts.view(*weights.shape, -1).transpose(0, 1)


def grouped_mlp_reference(
    x: Tensor, gate_up: Tensor, down: Tensor, ids: Tensor, weights: Tensor
) -> Tensor:
    """`grouped_mlp` in PyTorch, as plainly as it can be written."""
    of_slots = x.new_zeros((*ids.shape, x.shape[1]))
    for expert in ids[ids < len(gate_up)].unique().tolist():
        token, slot = (ids == expert).nonzero(as_tuple=True)
        inner = silu_and_mul_reference(x[token] @ gate_up[expert].t())
        of_slots[token, slot] = inner @ down[expert].t()
    out = torch.zeros(x.shape, dtype=torch.float32, device=x.device)
    for values, weight in zip(of_slots.unbind(1), weights.unbind(1), strict=True):
        out += values.float() * weight.unsqueeze(1)
    return out.to(x.dtype)
