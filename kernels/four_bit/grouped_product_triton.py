"""The two matrix products of MoE experts with 4-bit weights and 16-bit tokens, in Triton, on the
tiles of `moe`. `FourBitExperts.multiply` calls both.

A *slot* is one of the k experts that a token chose. *Sorted order* puts the slots of one expert
next to each other (`Alignment`), and a tile has up to BLOCK_M of them. K is cut into panels of 64
columns (`panels.py`).

Weights are the left operand of the matrix instruction, because that operand may come from
registers, where the weights are unpacked. So only 4 bits per weight are read from memory, and
nothing is written back. A step takes two panels, 128 columns, because one word of scales covers
them. Rows past a tile's end are zeros and are not read: with few tokens they would be most of the
traffic besides the weights.
"""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

from batchgen.kernels.four_bit.panels import PANEL_WORDS, FourBitPanels
from batchgen.kernels.four_bit.steps_triton import add_panel, add_steps, load_tokens
from batchgen.kernels.four_bit.tiles import FourBitProductTiles
from batchgen.kernels.four_bit.unpack_triton import load_scales, scale_rows, times_factors
from batchgen.kernels.moe.epilogues import PLAIN, Epilogues
from batchgen.kernels.moe.moe_align_triton import TILE_ARGUMENTS, Alignment
from batchgen.kernels.moe.slot_tile_triton import (
    gated_product,
    store_slots,
    tile_of_program,
    with_added,
    with_bias,
)
from batchgen.kernels.moe.tiled_layout import PANEL

_PANEL = tl.constexpr(PANEL)
_WORDS = tl.constexpr(PANEL_WORDS)


def four_bit_gate_up(
    x: Tensor,  # [T, H]
    weight: FourBitPanels,  # [E, 2·I, H]: the I rows of gate, then the rows of up
    alignment: Alignment,  # of the T·k slots
    tiles: FourBitProductTiles,
    k: int,
    out: Tensor,  # [T·k, I]
    epilogues: Epilogues = PLAIN,
    added: Tensor | None = None,  # [T·k, parts · I], in the order of slots
) -> None:
    """Compute silu(gate·x) · (up·x) of every slot in float32, or the function that `epilogues`
    name, into `out` in sorted order. `added` is what adapters add to the products before the
    gate."""
    inner = out.shape[1]
    limit, slope = epilogues.clamped or (None, None)
    grid = (alignment.most_tiles * triton.cdiv(inner, tiles.block_n),)
    _gate_up[grid](
        x, weight.words, weight.scales, epilogues.gate_up_bias, added, out, *alignment.tensors,
        x.stride(0), k, inner, weight.words.shape[1], LIMIT=limit, SLOPE=slope,
        GELU=epilogues.function == "gelu",
        **_options(alignment, tiles, weight),
    )  # fmt: skip


def four_bit_down(
    x: Tensor,  # [N, I], contiguous, in sorted order
    weight: FourBitPanels,  # [E, H, I]
    slot_weights: Tensor,  # [N] float32, in the order of slots
    alignment: Alignment,
    tiles: FourBitProductTiles,
    out: Tensor,  # [N, H], contiguous
    bias: Tensor | None = None,  # [E, H], contiguous
) -> None:
    """Compute slot weight · (down·x + bias) of every slot in float32, into `out` in the order of
    slots."""
    hidden = out.shape[1]
    grid = (alignment.most_tiles * triton.cdiv(hidden, tiles.block_n),)
    _down[grid](
        x, weight.words, weight.scales, bias, slot_weights, out, *alignment.tensors, hidden,
        weight.words.shape[1], **_options(alignment, tiles, weight),
    )  # fmt: skip


def _options(
    alignment: Alignment, tiles: FourBitProductTiles, weight: FourBitPanels
) -> dict[str, int | bool | str]:
    """Return the constants that both kernels are compiled with.

    EVEN: whether the number of panels is even. HALVE: see `FourBitProductTiles.halve`.
    """
    return {
        **weight.constants,
        "BLOCK_M": alignment.block_m,
        "BLOCK_N": tiles.block_n,
        "EVEN": weight.words.shape[1] % 2 == 0,
        "HALVE": tiles.halve,
        "INTERPRETED": not weight.words.is_cuda,
        "num_warps": tiles.num_warps,
        "num_stages": tiles.num_stages,
    }


@triton.jit(do_not_specialize=["slots_per_token"], do_not_specialize_on_alignment=TILE_ARGUMENTS)
def _gate_up(
    x_ptr, words_ptr, scales_ptr, bias_ptr, added_ptr, out_ptr, slots_ptr, tile_experts_ptr,
    tile_firsts_ptr, tile_ends_ptr, num_tiles_ptr, x_stride, slots_per_token, inner, panels,
    LIMIT: tl.constexpr, SLOPE: tl.constexpr, GELU: tl.constexpr, BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr, CODE: tl.constexpr, GROUP: tl.constexpr, EVEN: tl.constexpr,
    HALVE: tl.constexpr, INTERPRETED: tl.constexpr,
):  # fmt: skip
    """Each program computes one tile: the slots of `tile_of_program`, times BLOCK_N columns of the
    result. With HALVE a tile that is at most half full is computed as one of BLOCK_M / 2 slots."""
    columns = tl.cdiv(inner, BLOCK_N)
    is_past, expert, first, end = tile_of_program(
        tile_experts_ptr, tile_firsts_ptr, tile_ends_ptr, num_tiles_ptr, columns
    )
    if is_past:
        return
    first_column = tl.program_id(0) % columns * BLOCK_N
    if HALVE and end - first <= BLOCK_M // 2:
        _gate_up_tile(
            x_ptr, words_ptr, scales_ptr, bias_ptr, added_ptr, out_ptr, slots_ptr, expert, first,
            end, first_column, x_stride, slots_per_token, inner, panels, LIMIT, SLOPE, GELU,
            BLOCK_M // 2, BLOCK_N, CODE, GROUP, EVEN, INTERPRETED,
        )  # fmt: skip
    else:
        _gate_up_tile(
            x_ptr, words_ptr, scales_ptr, bias_ptr, added_ptr, out_ptr, slots_ptr, expert, first,
            end, first_column, x_stride, slots_per_token, inner, panels, LIMIT, SLOPE, GELU,
            BLOCK_M, BLOCK_N, CODE, GROUP, EVEN, INTERPRETED,
        )  # fmt: skip


@triton.jit
def _gate_up_tile(
    x_ptr, words_ptr, scales_ptr, bias_ptr, added_ptr, out_ptr, slots_ptr, expert, first, end,
    first_column, x_stride, slots_per_token, inner, panels,
    LIMIT: tl.constexpr, SLOPE: tl.constexpr, GELU: tl.constexpr, BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr, CODE: tl.constexpr, GROUP: tl.constexpr, EVEN: tl.constexpr,
    INTERPRETED: tl.constexpr,
):  # fmt: skip
    """Compute the slots from `first` to `end` - 1, in sorted order, times the columns from
    `first_column` on. Sums are transposed: [columns, slots], as weights are the left operand."""
    DTYPE: tl.constexpr = x_ptr.dtype.element_ty
    index = first + tl.arange(0, BLOCK_M)
    column = first_column + tl.arange(0, BLOCK_N)
    # Rows past the last one wrap to other rows of the weight; their results are not written.
    row = column % inner
    is_slot = index < end
    slot = tl.load(slots_ptr + tl.minimum(index, end - 1))
    token = (slot // slots_per_token).to(tl.int64)
    x_source = x_ptr + token[:, None] * x_stride + tl.arange(0, _PANEL)[None, :]
    rows = 2 * inner
    steps = tl.cdiv(panels, 2)
    of_row = row[:, None] * _WORDS + tl.arange(0, _WORDS)[None, :]
    words = words_ptr + expert.to(tl.int64) * (panels * rows * _WORDS) + of_row
    scales = scales_ptr + expert.to(tl.int64) * (scale_rows(panels, CODE, GROUP) * rows) + row

    gate = tl.zeros([BLOCK_N, BLOCK_M], tl.float32)
    up = tl.zeros([BLOCK_N, BLOCK_M], tl.float32)
    for step in tl.range(0, steps):
        gate_scales = load_scales(scales, 0, step, panels - 1, rows, CODE, GROUP)
        up_scales = load_scales(scales, inner, step, panels - 1, rows, CODE, GROUP)
        for half in tl.static_range(2):
            panel = step * 2 + half
            x = load_tokens(x_source, is_slot, panel, panels, half, EVEN, INTERPRETED)
            gate = add_panel(
                gate, words, gate_scales, x, panel, panels, rows * _WORDS, half, CODE, DTYPE, EVEN,
                BLOCK_N, INTERPRETED,
            )  # fmt: skip
            up = add_panel(
                up, words + inner * _WORDS, up_scales, x, panel, panels, rows * _WORDS, half, CODE,
                DTYPE, EVEN, BLOCK_N, INTERPRETED,
            )  # fmt: skip

    gate = times_factors(gate, scales, panels, rows, CODE)
    up = times_factors(up, scales + inner, panels, rows, CODE)
    gate = with_bias(gate, bias_ptr, expert, rows, row, SWAP=True)
    up = with_bias(up, bias_ptr, expert, rows, inner + row, SWAP=True)
    gate = with_added(gate, added_ptr, slot, rows, row, SWAP=True)
    up = with_added(up, added_ptr, slot, rows, inner + row, SWAP=True)
    result = tl.trans(gated_product(gate, up, LIMIT, SLOPE, GELU).to(out_ptr.dtype.element_ty))
    target = out_ptr + index.to(tl.int64)[:, None] * inner + column[None, :]
    tl.store(target, result, mask=is_slot[:, None] & (column < inner)[None, :])


@triton.jit(do_not_specialize_on_alignment=TILE_ARGUMENTS)
def _down(
    x_ptr, words_ptr, scales_ptr, bias_ptr, slot_weights_ptr, out_ptr, slots_ptr, tile_experts_ptr,
    tile_firsts_ptr, tile_ends_ptr, num_tiles_ptr, hidden, panels,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, CODE: tl.constexpr, GROUP: tl.constexpr,
    EVEN: tl.constexpr, HALVE: tl.constexpr, INTERPRETED: tl.constexpr,
):  # fmt: skip
    """Each program computes one tile, as in `_gate_up`."""
    columns = tl.cdiv(hidden, BLOCK_N)
    is_past, expert, first, end = tile_of_program(
        tile_experts_ptr, tile_firsts_ptr, tile_ends_ptr, num_tiles_ptr, columns
    )
    if is_past:
        return
    first_column = tl.program_id(0) % columns * BLOCK_N
    if HALVE and end - first <= BLOCK_M // 2:
        _down_tile(
            x_ptr, words_ptr, scales_ptr, bias_ptr, slot_weights_ptr, out_ptr, slots_ptr, expert,
            first, end, first_column, hidden, panels, BLOCK_M // 2, BLOCK_N, CODE, GROUP, EVEN,
            INTERPRETED,
        )  # fmt: skip
    else:
        _down_tile(
            x_ptr, words_ptr, scales_ptr, bias_ptr, slot_weights_ptr, out_ptr, slots_ptr, expert,
            first, end, first_column, hidden, panels, BLOCK_M, BLOCK_N, CODE, GROUP, EVEN,
            INTERPRETED,
        )  # fmt: skip


@triton.jit
def _down_tile(
    x_ptr, words_ptr, scales_ptr, bias_ptr, slot_weights_ptr, out_ptr, slots_ptr, expert, first,
    end, first_column, hidden, panels,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, CODE: tl.constexpr, GROUP: tl.constexpr,
    EVEN: tl.constexpr, INTERPRETED: tl.constexpr,
):  # fmt: skip
    """Compute the slots from `first` to `end` - 1 times the columns from `first_column` on."""
    index = first + tl.arange(0, BLOCK_M)
    column = first_column + tl.arange(0, BLOCK_N)
    row = column % hidden
    is_slot = index < end
    x_row = index.to(tl.int64)[:, None] * (panels * _PANEL)
    x_source = x_ptr + x_row + tl.arange(0, _PANEL)[None, :]
    steps = tl.cdiv(panels, 2)
    of_row = row[:, None] * _WORDS + tl.arange(0, _WORDS)[None, :]
    words = words_ptr + expert.to(tl.int64) * (panels * hidden * _WORDS) + of_row
    scales = scales_ptr + expert.to(tl.int64) * (scale_rows(panels, CODE, GROUP) * hidden) + row

    acc = tl.zeros([BLOCK_N, BLOCK_M], tl.float32)
    acc = add_steps(
        acc, x_source, is_slot, words, scales, 0, steps, panels, hidden, CODE, GROUP,
        x_ptr.dtype.element_ty, BLOCK_N, EVEN, INTERPRETED,
    )  # fmt: skip

    acc = times_factors(acc, scales, panels, hidden, CODE)
    acc = with_bias(acc, bias_ptr, expert, hidden, row, SWAP=True)
    store_slots(acc, out_ptr, slots_ptr, slot_weights_ptr, index, end, column, hidden, SWAP=True)
