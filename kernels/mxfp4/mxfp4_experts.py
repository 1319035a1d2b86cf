"""Experts whose weights are in MXFP4."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from batchgen.kernels.layers.shared_part import SharedPart, add_up
from batchgen.kernels.moe.epilogues import PLAIN, Epilogues
from batchgen.kernels.moe.experts import grouped_mlp_reference
from batchgen.kernels.moe.tiled_layout import PANEL
from batchgen.kernels.mxfp4.mxfp4_experts_triton import (
    mxfp4_grouped_mlp_triton,
    mxfp4_grouped_parts_triton,
)
from batchgen.kernels.mxfp4.mxfp4_layout import MXFP4Panels, unpack_panels


def takes_mxfp4(dtype: torch.dtype, *widths: int) -> bool:
    """Whether tokens of this dtype are multiplied by weights of these widths K in MXFP4: bfloat16,
    if panels divide the widths."""
    return dtype == torch.bfloat16 and all(width % PANEL == 0 for width in widths)


def mxfp4_grouped_mlp(
    x: Tensor,  # [T, H] bfloat16
    gate_up: MXFP4Panels,  # [E, 2·I, H]
    down: MXFP4Panels,  # [E, H, I]
    ids: Tensor,
    weights: Tensor,
    residual: Tensor | None = None,
    *,
    epilogues: Epilogues = PLAIN,
    shared: Callable[[], SharedPart] | None = None,
    num_routed: int | None = None,
) -> Tensor:
    """Compute `moe/experts.grouped_mlp` with weights in MXFP4, as if they were dequantised."""
    if x.is_cuda:
        return mxfp4_grouped_mlp_triton(
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
    out = mxfp4_grouped_mlp_reference(x, gate_up, down, ids, weights, epilogues)
    return add_up(out, residual, shared)


def mxfp4_grouped_parts(
    x: Tensor,
    gate_up: MXFP4Panels,
    down: MXFP4Panels,
    ids: Tensor,
    weights: Tensor,
    epilogues: Epilogues = PLAIN,
) -> Tensor | None:
    """Compute what `mxfp4_grouped_mlp` adds up: [k, T, H], dtype of x, the last axis contiguous;
    None where parts are not computed, which is on a CPU and without tokens."""
    if not x.is_cuda or not len(x):
        return None
    parts = mxfp4_grouped_parts_triton(x, gate_up, down, ids, weights, epilogues=epilogues)
    return parts.view(*weights.shape, -1).transpose(0, 1)


def mxfp4_grouped_mlp_reference(
    x: Tensor,
    gate_up: MXFP4Panels,
    down: MXFP4Panels,
    ids: Tensor,
    weights: Tensor,
    epilogues: Epilogues = PLAIN,
) -> Tensor:
    """`mxfp4_grouped_mlp` in PyTorch, as plainly as it can be written."""
    wide, narrow = (unpack_panels(panels).dequantise(x.dtype) for panels in (gate_up, down))
    return grouped_mlp_reference(x, wide, narrow, ids, weights, epilogues)
