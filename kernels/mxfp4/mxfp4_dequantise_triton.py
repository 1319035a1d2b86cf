"""Weights of experts in MXFP4 become panels of bfloat16 in memory, in Triton."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from batchgen.kernels.moe.tiled_layout import PANEL
from batchgen.kernels.mxfp4.mxfp4_layout import PANEL_WORDS, MXFP4Panels
from batchgen.kernels.mxfp4.unpack_triton import unpack_panel

_PANEL = tl.constexpr(PANEL)
_WORDS = tl.constexpr(PANEL_WORDS)
_ROWS = 128
"""Rows of two panels that a program unpacks."""


def dequantise_panels(weight: MXFP4Panels) -> Tensor:
    """Compute the panels [E, K/64, N, 64] of the weights in bfloat16 (`moe/tiled_layout.py`)."""
    experts, panels, rows, _ = weight.words.shape
    device = weight.words.device
    out = torch.empty((experts, panels, rows, PANEL), dtype=torch.bfloat16, device=device)
    blocks = triton.cdiv(rows, _ROWS)
    grid = (blocks, triton.cdiv(panels, 2), experts)
    _dequantise[grid](
        *weight, out, rows, panels, ROWS=_ROWS, INTERPRETED=not out.is_cuda, num_warps=4
    )
    return out


@triton.jit
def _dequantise(
    words_ptr, scales_ptr, out_ptr, rows, panels, ROWS: tl.constexpr, INTERPRETED: tl.constexpr
):
    """Each program unpacks some rows of two panels of an expert."""
    step = tl.program_id(1)
    expert = tl.program_id(2).to(tl.int64)
    row = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    is_row = row < rows
    source = scales_ptr + (expert * tl.num_programs(1) + step) * rows + row
    scales = tl.load(source, mask=is_row, other=0)
    for half in tl.static_range(2):
        panel = step * 2 + half
        of_row = ((expert * panels + panel) * rows + row)[:, None]
        word = tl.arange(0, _WORDS)
        mask = is_row[:, None] & (panel * _WORDS + word < panels * _WORDS)[None, :]
        words = tl.load(words_ptr + of_row * _WORDS + word[None, :], mask=mask, other=0)
        weights = unpack_panel(words, scales, half, ROWS, INTERPRETED)
        column = tl.arange(0, _PANEL)
        mask = is_row[:, None] & (panel * _PANEL + column < panels * _PANEL)[None, :]
        target = out_ptr + of_row * _PANEL + column[None, :]
        tl.store(target, weights.to(out_ptr.dtype.element_ty), mask=mask)
