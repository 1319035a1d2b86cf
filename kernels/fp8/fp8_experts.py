"""Experts whose weights are in FP8."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from batchgen.kernels.fp8.fp8_experts_triton import fp8_grouped_mlp_triton, fp8_grouped_parts_triton
from batchgen.kernels.fp8.fp8_linear import fp8_linear_reference
from batchgen.kernels.fp8.fp8_weight import FP8Weight
from batchgen.kernels.fp8.quantise import RoundedRows, plain_rows, quantise_rows
from batchgen.kernels.layers.activation import silu_and_mul_reference
from batchgen.kernels.layers.shared_part import SharedPart, add_up


def fp8_grouped_mlp(
    x: Tensor | RoundedRows,  # quantised by `powers_of_two` if it comes as `RoundedRows`
    gate_up: FP8Weight,
    down: FP8Weight,
    ids: Tensor,
    weights: Tensor,
    residual: Tensor | None = None,
    *,
    shared: Callable[[], SharedPart] | None = None,
    powers_of_two: bool = False,  # the scales of activations are powers of two
    num_routed: int | None = None,
) -> Tensor:
    """Compute `moe/experts.grouped_mlp` with weights in FP8.

    x and what is between the two products are quantised in groups of 128 values. If 128 rows of a
    weight share a scale, I is a multiple of 128.
    """
    plain = plain_rows(x)
    if plain.is_cuda:
        return fp8_grouped_mlp_triton(
            x,
            gate_up,
            down,
            ids,
            weights,
            residual,
            shared=shared,
            powers_of_two=powers_of_two,
            num_routed=num_routed,
        )
    out = fp8_grouped_mlp_reference(plain, gate_up, down, ids, weights, powers_of_two)
    return add_up(out, residual, shared)


def fp8_grouped_parts(
    x: Tensor | RoundedRows,
    gate_up: FP8Weight,
    down: FP8Weight,
    ids: Tensor,
    weights: Tensor,
    *,
    powers_of_two: bool = False,
) -> Tensor | None:
    """Compute what `fp8_grouped_mlp` adds up: [k, T, H], dtype of x, the last axis contiguous; None
    where parts are not computed, which is on a CPU and without tokens."""
    if not weights.is_cuda or not len(weights):
        return None
    parts = fp8_grouped_parts_triton(x, gate_up, down, ids, weights, powers_of_two=powers_of_two)
    return parts.view(*weights.shape, -1).transpose(0, 1)


def fp8_grouped_mlp_reference(
    x: Tensor,
    gate_up: FP8Weight,
    down: FP8Weight,
    ids: Tensor,
    weights: Tensor,
    powers_of_two: bool = False,
) -> Tensor:
    """`fp8_grouped_mlp` in PyTorch, as plainly as it can be written."""
    of_slots = torch.zeros((*ids.shape, x.shape[1]), device=x.device)
    for expert in ids[ids < len(gate_up.values)].unique().tolist():
        token, slot = (ids == expert).nonzero(as_tuple=True)
        wide, narrow = (FP8Weight(w.values[expert], w.scales[expert]) for w in (gate_up, down))
        tokens = quantise_rows(x[token], powers_of_two=powers_of_two)
        inner = silu_and_mul_reference(fp8_linear_reference(tokens, wide))
        inner_rows = quantise_rows(inner, powers_of_two=powers_of_two)
        of_slots[token, slot] = fp8_linear_reference(inner_rows, narrow)
    return (of_slots * weights.unsqueeze(-1)).sum(1).to(x.dtype)
