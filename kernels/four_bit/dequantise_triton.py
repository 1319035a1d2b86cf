"""Dequantises 4-bit weights to 16-bit floats in GPU memory, in Triton.

`experts.py` and `linear.py` call it for large batches, which are multiplied in 16 bits.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from batchgen.kernels.four_bit.panels import PANEL_WORDS, FourBitPanels
from batchgen.kernels.four_bit.unpack_triton import (
    load_scales,
    scale_rows,
    times_factors,
    unpack_panel,
)
from batchgen.kernels.moe.tiled_layout import PANEL

_PANEL = tl.constexpr(PANEL)
_WORDS = tl.constexpr(PANEL_WORDS)
_ROWS = 128
"""Rows of two panels that a program unpacks."""


def dequantise_panels(weight: FourBitPanels) -> Tensor:
    """Compute the weights in 16 bits as panels [E, K/64, N, 64], the layout of
    `moe/tiled_layout.py`."""
    experts, panels, rows, _ = weight.words.shape
    device = weight.words.device
    out = torch.empty((experts, panels, rows, PANEL), dtype=weight.dtype, device=device)
    _launch(weight, out, rows * PANEL, PANEL)
    return out


def dequantise_rows(weight: FourBitPanels) -> Tensor:
    """Compute the weights [E, N, K] in 16 bits."""
    out = torch.empty(weight.sizes, dtype=weight.dtype, device=weight.words.device)
    _launch(weight, out, PANEL, out.shape[2])
    return out


def _launch(weight: FourBitPanels, out: Tensor, panel_stride: int, row_stride: int) -> None:
    """Launch the kernel. The strides are the elements of `out` from a panel of an expert to the
    next, and from a row to the next."""
    experts, panels, rows, _ = weight.words.shape
    grid = (triton.cdiv(rows, _ROWS), triton.cdiv(panels, 2), experts)
    _dequantise[grid](
        weight.words, weight.scales, out, rows, panels, panel_stride, row_stride,
        **weight.constants, ROWS=_ROWS, INTERPRETED=not out.is_cuda, num_warps=4,
    )  # fmt: skip


@triton.jit
def _dequantise(
    words_ptr, scales_ptr, out_ptr, rows, panels, panel_stride, row_stride,
    CODE: tl.constexpr, GROUP: tl.constexpr, ROWS: tl.constexpr, INTERPRETED: tl.constexpr,
):  # fmt: skip
    """Each program unpacks some rows of two adjacent panels of one expert."""
    DTYPE: tl.constexpr = out_ptr.dtype.element_ty
    step = tl.program_id(1)
    expert = tl.program_id(2).to(tl.int64)
    row = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    is_row = row < rows
    source_row = tl.minimum(row, rows - 1)
    source = scales_ptr + expert * (scale_rows(panels, CODE, GROUP) * rows) + source_row
    scales = load_scales(source, 0, step, panels - 1, rows, CODE, GROUP)
    for half in tl.static_range(2):
        panel = step * 2 + half
        of_row = ((expert * panels + panel) * rows + row)[:, None]
        word = tl.arange(0, _WORDS)
        mask = is_row[:, None] & (panel * _WORDS + word < panels * _WORDS)[None, :]
        words = tl.load(words_ptr + of_row * _WORDS + word[None, :], mask=mask, other=0)
        weights = unpack_panel(words, scales, half, CODE, DTYPE, ROWS, INTERPRETED)
        weights = times_factors(weights, source, panels, rows, CODE)
        column = tl.arange(0, _PANEL)
        mask = is_row[:, None] & (panel * _PANEL + column < panels * _PANEL)[None, :]
        of_row = expert * panels * rows * _PANEL + row.to(tl.int64)[:, None] * row_stride
        target = out_ptr + of_row + panel.to(tl.int64) * panel_stride + column[None, :]
        tl.store(target, weights.to(DTYPE), mask=mask)
