"""Experts whose weights are in 4 bits."""

from __future__ import annotations

from collections.abc import Callable

from torch import Tensor

from batchgen.kernels.four_bit.experts_triton import (
    four_bit_mlp_parts_triton,
    four_bit_mlp_triton,
)
from batchgen.kernels.four_bit.layouts import dequantise_reference
from batchgen.kernels.four_bit.panels import FourBitPanels
from batchgen.kernels.layers.shared_part import SharedPart, add_up
from batchgen.kernels.moe.epilogues import PLAIN, Epilogues
from batchgen.kernels.moe.experts import grouped_mlp_reference


def four_bit_mlp(
    x: Tensor,  # [T, H], bfloat16, or the dtype of the scales of int4
    gate_up: FourBitPanels,  # [E, 2·I, H]
    down: FourBitPanels,  # [E, H, I]
    ids: Tensor,
    weights: Tensor,
    residual: Tensor | None = None,
    *,
    epilogues: Epilogues = PLAIN,
    shared: Callable[[], SharedPart] | None = None,
    num_routed: int | None = None,
) -> Tensor:
    """Compute `moe/experts.grouped_mlp` with weights in 4 bits, as if they were dequantised."""
    if x.is_cuda:
        return four_bit_mlp_triton(
            x,
            gate_up,
            down,
            ids,
            weights,
            residual,
            epilogues=epilogues,
            shared=shared,
            num_routed=num_routed,
        )
    out = four_bit_mlp_reference(x, gate_up, down, ids, weights, epilogues)
    return add_up(out, residual, shared)


def four_bit_parts(
    x: Tensor,
    gate_up: FourBitPanels,
    down: FourBitPanels,
    ids: Tensor,
    weights: Tensor,
    epilogues: Epilogues = PLAIN,
) -> Tensor | None:
    """Compute what `four_bit_mlp` adds up: [k, T, H], dtype of x, the last axis contiguous;
    None where parts are not computed, which is on a CPU and without tokens."""
    if not x.is_cuda or not len(x):
        return None
    parts = four_bit_mlp_parts_triton(x, gate_up, down, ids, weights, epilogues=epilogues)
    return parts.view(*weights.shape, -1).transpose(0, 1)


def four_bit_mlp_reference(
    x: Tensor,
    gate_up: FourBitPanels,
    down: FourBitPanels,
    ids: Tensor,
    weights: Tensor,
    epilogues: Epilogues = PLAIN,
) -> Tensor:
    """`four_bit_mlp` in PyTorch, as plainly as it can be written."""
    wide, narrow = (dequantise_reference(panels).to(x.dtype) for panels in (gate_up, down))
    return grouped_mlp_reference(x, wide, narrow, ids, weights, epilogues)
