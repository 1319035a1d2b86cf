"""Experts whose weights are in 4 bits, in Triton: the launches of `moe/experts_triton.py`."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import torch
from torch import Tensor

from batchgen.kernels.four_bit.dequantise_triton import dequantise_panels
from batchgen.kernels.four_bit.grouped_product_triton import four_bit_down, four_bit_gate_up
from batchgen.kernels.four_bit.panels import FourBitPanels
from batchgen.kernels.four_bit.tiles import FourBitTiles, four_bit_tiles
from batchgen.kernels.layers.shared_part import SharedPart
from batchgen.kernels.moe.epilogues import PLAIN, Epilogues
from batchgen.kernels.moe.experts_triton import sum_of_slots
from batchgen.kernels.moe.grouped_product_triton import down_product, gate_up_product
from batchgen.kernels.moe.moe_align_triton import moe_align
from batchgen.kernels.moe.moe_tiles import MoETiles, tiles_of_panels


def four_bit_mlp_triton(
    x: Tensor,
    gate_up: FourBitPanels,
    down: FourBitPanels,
    ids: Tensor,
    weights: Tensor,
    residual: Tensor | None = None,
    *,
    epilogues: Epilogues = PLAIN,
    shared: Callable[[], SharedPart] | None = None,
    num_routed: int | None = None,
    tiles: FourBitTiles | MoETiles | None = None,
) -> Tensor:
    """Compute `four_bit_mlp` in four launches, eight if there are many tokens.

    Tensors are contiguous, x in its last axis. That ids are in range is not checked on a GPU.
    `tiles` says how the products are cut, those of `moe` that weights are dequantised before; None
    chooses from the tables.
    """
    parts = partial(
        four_bit_mlp_parts_triton,
        x,
        gate_up,
        down,
        ids,
        weights,
        epilogues=epilogues,
        num_routed=num_routed,
        tiles=tiles,
    )
    return sum_of_slots(parts, x, residual, ids, len(gate_up.words), num_routed, shared)


def four_bit_mlp_parts_triton(
    x: Tensor,
    gate_up: FourBitPanels,
    down: FourBitPanels,
    ids: Tensor,
    weights: Tensor,
    *,
    epilogues: Epilogues = PLAIN,
    num_routed: int | None = None,
    tiles: FourBitTiles | MoETiles | None = None,
) -> Tensor:
    """Compute what `four_bit_mlp_triton` adds up: [T·k, H], dtype of x, the slots' results
    times their weights. There must be tokens. Nothing is written for slots whose expert is
    elsewhere."""
    tokens, hidden = x.shape
    (experts, _, inner), k = down.sizes, ids.shape[1]
    assert gate_up.sizes == (experts, 2 * inner, hidden) and down.sizes == (experts, hidden, inner)
    assert x.dtype == gate_up.dtype == down.dtype and x.stride(1) == 1
    assert weights.shape == ids.shape == (tokens, k) and weights.is_contiguous()
    num_routed = num_routed or experts
    slots = ids.numel() * experts // num_routed
    tiles = tiles or four_bit_tiles(slots, experts) or tiles_of_panels(slots, experts)
    alignment = moe_align(ids, experts, tiles.block_m, some_elsewhere=num_routed > experts)
    activated = torch.empty((tokens * k, inner), dtype=x.dtype, device=x.device)
    parts = torch.empty((tokens * k, hidden), dtype=x.dtype, device=x.device)
    if isinstance(tiles, FourBitTiles):
        four_bit_gate_up(x, gate_up, alignment, tiles.gate_up, k, activated, epilogues)
        four_bit_down(activated, down, weights, alignment, tiles.down, parts, epilogues.down_bias)
        return parts
    # The first matrix is freed before the second one needs memory.
    gate_up_product(
        x, dequantise_panels(gate_up), alignment, tiles.gate_up, k, activated, epilogues
    )
    down_product(
        activated, dequantise_panels(down), weights, alignment, tiles.down, parts,
        epilogues.down_bias,
    )  # fmt: skip
    return parts
