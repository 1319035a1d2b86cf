"""Experts whose weights are in FP8, in Triton: the launches of `moe/experts_triton.py`, with tokens
quantised before the first product, which quantises its own result for the second."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import torch
import triton
from torch import Tensor

from batchgen.kernels.fp8.fp8_grouped_product_triton import fp8_down, fp8_gate_up
from batchgen.kernels.fp8.fp8_tiles import ExpertTiles, expert_tiles
from batchgen.kernels.fp8.fp8_weight import BLOCK, FP8, FP8Weight
from batchgen.kernels.fp8.quantise import RoundedRows, plain_rows
from batchgen.kernels.fp8.quantise_triton import quantise_rows_triton
from batchgen.kernels.layers.shared_part import SharedPart
from batchgen.kernels.moe.experts_triton import sum_of_slots
from batchgen.kernels.moe.moe_align_triton import moe_align
from batchgen.kernels.moe.tiled_layout import matrix_sizes


def fp8_grouped_mlp_triton(
    x: Tensor | RoundedRows,
    gate_up: FP8Weight,
    down: FP8Weight,
    ids: Tensor,
    weights: Tensor,
    residual: Tensor | None = None,
    *,
    shared: Callable[[], SharedPart] | None = None,
    powers_of_two: bool = False,
    num_routed: int | None = None,
    tiles: ExpertTiles | None = None,
) -> Tensor:
    """Compute `fp8_grouped_mlp` in five launches, seven if there are many tokens; one less if the
    tokens are quantised already.

    Tensors are contiguous, x in its last axis. That ids are in range is not checked on a GPU.
    `tiles` says how the products are cut; None chooses from the table.
    """
    parts = partial(
        fp8_grouped_parts_triton,
        x,
        gate_up,
        down,
        ids,
        weights,
        powers_of_two=powers_of_two,
        num_routed=num_routed,
        tiles=tiles,
    )
    return sum_of_slots(
        parts, plain_rows(x), residual, ids, len(gate_up.values), num_routed, shared
    )


def fp8_grouped_parts_triton(
    x: Tensor | RoundedRows,
    gate_up: FP8Weight,
    down: FP8Weight,
    ids: Tensor,
    weights: Tensor,
    *,
    powers_of_two: bool = False,
    num_routed: int | None = None,
    tiles: ExpertTiles | None = None,
) -> Tensor:
    """Compute what `fp8_grouped_mlp_triton` adds up: [T·k, H], dtype of x, the slots' results times
    their weights. There must be tokens. Nothing is written for slots whose expert is elsewhere."""
    plain = plain_rows(x)
    tokens, hidden = plain.shape
    (experts, _, inner), k = matrix_sizes(down.values), ids.shape[1]
    assert matrix_sizes(gate_up.values) == (experts, 2 * inner, hidden)
    assert matrix_sizes(down.values) == (experts, hidden, inner)
    assert gate_up.scale_rows == 1 or inner % BLOCK == 0
    assert weights.shape == ids.shape == (tokens, k) and weights.is_contiguous()
    num_routed = num_routed or experts
    tiles = tiles or expert_tiles(ids.numel() * experts // num_routed, experts)
    alignment = moe_align(ids, experts, tiles.block_m, some_elsewhere=num_routed > experts)
    if isinstance(x, RoundedRows):
        values, scales, _ = x.in_fp8
    else:
        values, scales = quantise_rows_triton(x, powers_of_two)
    slots, device = tokens * k, plain.device
    activated = torch.empty((slots, inner), dtype=FP8, device=device)
    of_groups = torch.empty((triton.cdiv(inner, BLOCK), slots), device=device)
    fp8_gate_up(values, scales, gate_up, alignment, tiles, k, activated, of_groups, powers_of_two)
    parts = torch.empty((slots, hidden), dtype=plain.dtype, device=device)
    fp8_down(activated, of_groups, down, weights, alignment, tiles, parts)
    return parts
