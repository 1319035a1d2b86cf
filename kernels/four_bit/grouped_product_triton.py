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

The sides of a `tl.dot` are powers of two, but experts rarely have that many slots. So a tile may
have a *tail*: BLOCK_M slots and TAIL more, such as 64 and 16. Weights that are unpacked once are
multiplied by both, and a tile without slots in its tail is computed without it.
"""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

from batchgen.kernels.four_bit.panels import PANEL_WORDS, FourBitPanels
from batchgen.kernels.four_bit.steps_triton import load_tokens, weights_of_panel
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

    EVEN: whether the number of panels is even. BLOCK_M and TAIL: see `FourBitProductTiles.tail`.
    """
    return {
        **weight.constants,
        "BLOCK_M": alignment.block_m - tiles.tail,
        "BLOCK_N": tiles.block_n,
        "EVEN": weight.words.shape[1] % 2 == 0,
        "TAIL": tiles.tail,
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
    TAIL: tl.constexpr, INTERPRETED: tl.constexpr,
):  # fmt: skip
    """Each program computes one tile: the slots of `tile_of_program`, times BLOCK_N columns of the
    result."""
    columns = tl.cdiv(inner, BLOCK_N)
    is_past, expert, first, end = tile_of_program(
        tile_experts_ptr, tile_firsts_ptr, tile_ends_ptr, num_tiles_ptr, columns
    )
    if is_past:
        return
    first_column = tl.program_id(0) % columns * BLOCK_N
    if TAIL == 0 or end - first <= BLOCK_M:
        _gate_up_tile(
            x_ptr, words_ptr, scales_ptr, bias_ptr, added_ptr, out_ptr, slots_ptr, expert, first,
            end, first_column, x_stride, slots_per_token, inner, panels, LIMIT, SLOPE, GELU,
            BLOCK_M, 0, BLOCK_N, CODE, GROUP, EVEN, INTERPRETED,
        )  # fmt: skip
    else:
        _gate_up_tile(
            x_ptr, words_ptr, scales_ptr, bias_ptr, added_ptr, out_ptr, slots_ptr, expert, first,
            end, first_column, x_stride, slots_per_token, inner, panels, LIMIT, SLOPE, GELU,
            BLOCK_M, TAIL, BLOCK_N, CODE, GROUP, EVEN, INTERPRETED,
        )  # fmt: skip


@triton.jit
def _gate_up_tile(
    x_ptr, words_ptr, scales_ptr, bias_ptr, added_ptr, out_ptr, slots_ptr, expert, first, end,
    first_column, x_stride, slots_per_token, inner, panels,
    LIMIT: tl.constexpr, SLOPE: tl.constexpr, GELU: tl.constexpr, BLOCK_M: tl.constexpr,
    TAIL: tl.constexpr, BLOCK_N: tl.constexpr, CODE: tl.constexpr, GROUP: tl.constexpr,
    EVEN: tl.constexpr, INTERPRETED: tl.constexpr,
):  # fmt: skip
    """Compute the slots from `first` to `end` - 1, in sorted order, times the columns from
    `first_column` on. Sums are transposed: [columns, slots], as weights are the left operand.

    The loop runs at least once. Unless the compiler knows that, it makes each matrix instruction
    wait for the one before it.
    """
    DTYPE: tl.constexpr = x_ptr.dtype.element_ty
    index = first + tl.arange(0, BLOCK_M)
    column = first_column + tl.arange(0, BLOCK_N)
    # Rows past the last one wrap to other rows of the weight; their results are not written.
    row = column % inner
    x_source = _token_rows(x_ptr, slots_ptr, index, end, x_stride, slots_per_token)
    rows = 2 * inner
    steps = tl.cdiv(panels, 2)
    of_row = row[:, None] * _WORDS + tl.arange(0, _WORDS)[None, :]
    words = words_ptr + expert.to(tl.int64) * (panels * rows * _WORDS) + of_row
    scales = scales_ptr + expert.to(tl.int64) * (scale_rows(panels, CODE, GROUP) * rows) + row

    gate = tl.zeros([BLOCK_N, BLOCK_M], tl.float32)
    up = tl.zeros([BLOCK_N, BLOCK_M], tl.float32)
    if TAIL:
        tail = first + BLOCK_M + tl.arange(0, TAIL)
        tail_source = _token_rows(x_ptr, slots_ptr, tail, end, x_stride, slots_per_token)
        tail_gate = tl.zeros([BLOCK_N, TAIL], tl.float32)
        tail_up = tl.zeros([BLOCK_N, TAIL], tl.float32)
    tl.assume(steps > 0)
    for step in tl.range(0, steps):
        gate_scales = load_scales(scales, 0, step, panels - 1, rows, CODE, GROUP)
        up_scales = load_scales(scales, inner, step, panels - 1, rows, CODE, GROUP)
        for half in tl.static_range(2):
            panel = step * 2 + half
            x = load_tokens(x_source, index < end, panel, panels, half, EVEN, INTERPRETED)
            if TAIL:
                tail_x = load_tokens(
                    tail_source, tail < end, panel, panels, half, EVEN, INTERPRETED
                )
            weights = weights_of_panel(
                words, gate_scales, panel, panels, rows * _WORDS, half, CODE, DTYPE, EVEN, BLOCK_N,
                INTERPRETED,
            )  # fmt: skip
            gate = tl.dot(weights, x, gate, input_precision="ieee")
            if TAIL:
                tail_gate = tl.dot(weights, tail_x, tail_gate, input_precision="ieee")
            weights = weights_of_panel(
                words + inner * _WORDS, up_scales, panel, panels, rows * _WORDS, half, CODE, DTYPE,
                EVEN, BLOCK_N, INTERPRETED,
            )  # fmt: skip
            up = tl.dot(weights, x, up, input_precision="ieee")
            if TAIL:
                tail_up = tl.dot(weights, tail_x, tail_up, input_precision="ieee")

    _store_gated(
        gate, up, scales, bias_ptr, added_ptr, out_ptr, slots_ptr, expert, index, end, row, column,
        inner, panels, LIMIT, SLOPE, GELU, CODE,
    )  # fmt: skip
    if TAIL:
        _store_gated(
            tail_gate, tail_up, scales, bias_ptr, added_ptr, out_ptr, slots_ptr, expert, tail, end,
            row, column, inner, panels, LIMIT, SLOPE, GELU, CODE,
        )  # fmt: skip


@triton.jit
def _token_rows(x_ptr, slots_ptr, index, end, x_stride, slots_per_token):
    """Return pointers [slots, 64] to the first panel of the tokens of the slots at `index`, in
    sorted order; slots from `end` on repeat the last one before it."""
    slot = tl.load(slots_ptr + tl.minimum(index, end - 1))
    token = (slot // slots_per_token).to(tl.int64)
    return x_ptr + token[:, None] * x_stride + tl.arange(0, _PANEL)[None, :]


@triton.jit
def _store_gated(
    gate, up, scales, bias_ptr, added_ptr, out_ptr, slots_ptr, expert, index, end, row, column,
    inner, panels, LIMIT: tl.constexpr, SLOPE: tl.constexpr, GELU: tl.constexpr, CODE: tl.constexpr,
):  # fmt: skip
    """Store the gated products of the sums `gate` and `up` [columns, slots], for the slots at
    `index` before `end` and the columns at `column` before `inner`. `row` are the columns' rows in
    the weight of gate, and `scales` point to their first scales."""
    rows = 2 * inner
    gate = times_factors(gate, scales, panels, rows, CODE)
    up = times_factors(up, scales + inner, panels, rows, CODE)
    gate = with_bias(gate, bias_ptr, expert, rows, row, SWAP=True)
    up = with_bias(up, bias_ptr, expert, rows, inner + row, SWAP=True)
    slot = tl.load(slots_ptr + tl.minimum(index, end - 1))
    gate = with_added(gate, added_ptr, slot, rows, row, SWAP=True)
    up = with_added(up, added_ptr, slot, rows, inner + row, SWAP=True)
    result = tl.trans(gated_product(gate, up, LIMIT, SLOPE, GELU).to(out_ptr.dtype.element_ty))
    target = out_ptr + index.to(tl.int64)[:, None] * inner + column[None, :]
    tl.store(target, result, mask=(index < end)[:, None] & (column < inner)[None, :])


@triton.jit(do_not_specialize_on_alignment=TILE_ARGUMENTS)
def _down(
    x_ptr, words_ptr, scales_ptr, bias_ptr, slot_weights_ptr, out_ptr, slots_ptr, tile_experts_ptr,
    tile_firsts_ptr, tile_ends_ptr, num_tiles_ptr, hidden, panels,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, CODE: tl.constexpr, GROUP: tl.constexpr,
    EVEN: tl.constexpr, TAIL: tl.constexpr, INTERPRETED: tl.constexpr,
):  # fmt: skip
    """Each program computes one tile, as in `_gate_up`."""
    columns = tl.cdiv(hidden, BLOCK_N)
    is_past, expert, first, end = tile_of_program(
        tile_experts_ptr, tile_firsts_ptr, tile_ends_ptr, num_tiles_ptr, columns
    )
    if is_past:
        return
    first_column = tl.program_id(0) % columns * BLOCK_N
    if TAIL == 0 or end - first <= BLOCK_M:
        _down_tile(
            x_ptr, words_ptr, scales_ptr, bias_ptr, slot_weights_ptr, out_ptr, slots_ptr, expert,
            first, end, first_column, hidden, panels, BLOCK_M, 0, BLOCK_N, CODE, GROUP, EVEN,
            INTERPRETED,
        )  # fmt: skip
    else:
        _down_tile(
            x_ptr, words_ptr, scales_ptr, bias_ptr, slot_weights_ptr, out_ptr, slots_ptr, expert,
            first, end, first_column, hidden, panels, BLOCK_M, TAIL, BLOCK_N, CODE, GROUP, EVEN,
            INTERPRETED,
        )  # fmt: skip


@triton.jit
def _down_tile(
    x_ptr, words_ptr, scales_ptr, bias_ptr, slot_weights_ptr, out_ptr, slots_ptr, expert, first,
    end, first_column, hidden, panels,
    BLOCK_M: tl.constexpr, TAIL: tl.constexpr, BLOCK_N: tl.constexpr, CODE: tl.constexpr,
    GROUP: tl.constexpr, EVEN: tl.constexpr, INTERPRETED: tl.constexpr,
):  # fmt: skip
    """Compute the slots from `first` to `end` - 1 times the columns from `first_column` on."""
    DTYPE: tl.constexpr = x_ptr.dtype.element_ty
    index = first + tl.arange(0, BLOCK_M)
    column = first_column + tl.arange(0, BLOCK_N)
    row = column % hidden
    x_row = index.to(tl.int64)[:, None] * (panels * _PANEL)
    x_source = x_ptr + x_row + tl.arange(0, _PANEL)[None, :]
    steps = tl.cdiv(panels, 2)
    of_row = row[:, None] * _WORDS + tl.arange(0, _WORDS)[None, :]
    words = words_ptr + expert.to(tl.int64) * (panels * hidden * _WORDS) + of_row
    scales = scales_ptr + expert.to(tl.int64) * (scale_rows(panels, CODE, GROUP) * hidden) + row

    acc = tl.zeros([BLOCK_N, BLOCK_M], tl.float32)
    if TAIL:
        tail = first + BLOCK_M + tl.arange(0, TAIL)
        tail_row = tail.to(tl.int64)[:, None] * (panels * _PANEL)
        tail_source = x_ptr + tail_row + tl.arange(0, _PANEL)[None, :]
        tail_acc = tl.zeros([BLOCK_N, TAIL], tl.float32)
    tl.assume(steps > 0)
    for step in tl.range(0, steps):
        of_step = load_scales(scales, 0, step, panels - 1, hidden, CODE, GROUP)
        for half in tl.static_range(2):
            panel = step * 2 + half
            x = load_tokens(x_source, index < end, panel, panels, half, EVEN, INTERPRETED)
            if TAIL:
                tail_x = load_tokens(
                    tail_source, tail < end, panel, panels, half, EVEN, INTERPRETED
                )
            weights = weights_of_panel(
                words, of_step, panel, panels, hidden * _WORDS, half, CODE, DTYPE, EVEN, BLOCK_N,
                INTERPRETED,
            )  # fmt: skip
            acc = tl.dot(weights, x, acc, input_precision="ieee")
            if TAIL:
                tail_acc = tl.dot(weights, tail_x, tail_acc, input_precision="ieee")

    acc = times_factors(acc, scales, panels, hidden, CODE)
    acc = with_bias(acc, bias_ptr, expert, hidden, row, SWAP=True)
    store_slots(acc, out_ptr, slots_ptr, slot_weights_ptr, index, end, column, hidden, SWAP=True)
    if TAIL:
        tail_acc = times_factors(tail_acc, scales, panels, hidden, CODE)
        tail_acc = with_bias(tail_acc, bias_ptr, expert, hidden, row, SWAP=True)
        store_slots(
            tail_acc, out_ptr, slots_ptr, slot_weights_ptr, tail, end, column, hidden, SWAP=True
        )  # fmt: skip
