"""Cuts the contexts of rows into splits for decode attention, on the device.

A row is a sequence, and a *split* is a run of its cached tokens that one program reads. All layers
of a forward share one plan, which the kernel of `decode.py` reads. Contexts grow from step to step,
so the plan is computed on the device: a CUDA graph that is captured once can then be replayed.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor

from batchgen.kernels.attention.windows import first_seen_triton, window_arguments
from batchgen.kernels.rules import Splits

_SPLIT_MULTIPLE = tl.constexpr(128)
"""Splits longer than `cut.tokens` have a multiple of this many tokens, so that only a row's last
split has a tile that is not full: tiles have at most 128 tokens (`DecodeConfig.block_n`)."""
UNIT_FIELDS = tl.constexpr(4)
"""Columns of `DecodePlan.units`."""


@dataclass(frozen=True, slots=True)
class DecodePlan:
    """The splits of the contexts of B rows; all layers of a forward share them.

    Each line of `units` is one split: its row, its first position, the position after its last, and
    the index of its partial result (-1 if the row has only one split). Longer splits come first.
    Lines from `count` on are not set.
    """

    units: Tensor  # [B · max_splits, 4] int32
    count: Tensor  # [1] int32, the splits of all rows
    splits: Tensor  # [B] int32, the splits of each row
    width: int  # W, the queries of each row
    max_splits: int  # the maximum for a row with block tables of this size


def plan_decode(
    positions: Tensor,  # [B · W] int64 from 0 on, within `block_tables`, not descending in a row
    block_tables: Tensor,  # [B, N], whose shape alone matters
    width: int,
    block_size: int,
    cut: Splits,
    *,
    window: int | None = None,
) -> DecodePlan:
    """Cut the contexts of B rows with W = `width` queries each into splits of `cut.tokens` tokens.

    A context of more than cut.max_splits · cut.tokens tokens is cut into at most `cut.max_splits`
    equal splits, whose length is rounded up to a multiple of 128. A context ends at its row's last
    query, or at N · block_size tokens. With a `window` (`SoftmaxOptions`) it begins at the first
    token that the row's first query sees, rounded down to a multiple of 128. So no context is
    empty, and each row has at least one split.
    """
    rows, blocks = block_tables.shape
    assert positions.numel() == rows * width and positions.is_contiguous()
    room = blocks * block_size
    # A context with a window may begin up to 127 tokens before it, because that is rounded down.
    longest = room if window is None else min(room, window + width + _SPLIT_MULTIPLE.value)
    capacity = min(cut.max_splits, triton.cdiv(longest, cut.tokens))
    device = positions.device
    units = torch.empty((rows * capacity, UNIT_FIELDS.value), dtype=torch.int32, device=device)
    count = torch.empty(1, dtype=torch.int32, device=device)
    splits = torch.empty(rows, dtype=torch.int32, device=device)
    _plan_kernel[(rows,)](
        positions, units, count, splits, rows, room, capacity,
        WIDTH=width, **window_arguments(window), SPLIT=cut.tokens, MAX_SPLITS=cut.max_splits,
        SPLITS_PAD=triton.next_power_of_2(cut.max_splits), ROWS=256, num_warps=4,
    )  # fmt: skip
    return DecodePlan(units, count, splits, width, capacity)


def row_pieces(block_tables: Tensor, pieces: int) -> Tensor:
    """Repeat each row of block tables [B, N] `pieces` times, because the row's queries are divided
    among that many rows of the plan. Return [B · pieces, N]."""
    if pieces == 1:
        return block_tables
    return block_tables.unsqueeze(1).expand(-1, pieces, -1).flatten(0, 1)


@triton.jit
def _begin(positions, rows, num_rows, WIDTH, WINDOW, CHUNKED):
    """Compute the int32 multiple of 128 at which the contexts of `rows` begin."""
    first = tl.load(positions + rows * WIDTH, mask=rows < num_rows, other=0).to(tl.int32)
    seen = first_seen_triton(first, WINDOW, CHUNKED)
    return tl.maximum(seen, 0) // _SPLIT_MULTIPLE * _SPLIT_MULTIPLE


@triton.jit
def _cut(positions, rows, num_rows, room, WIDTH, WINDOW, CHUNKED, SPLIT, MAX_SPLITS):
    """Return the tokens of the context, the tokens of a split, and the number of splits of each of
    `rows`, int32. Of rows past `num_rows` the context and the number are 0."""
    last = tl.load(positions + rows * WIDTH + WIDTH - 1, mask=rows < num_rows, other=-1)
    context = tl.minimum(last.to(tl.int32) + 1, room)
    if WINDOW is not None:
        context -= _begin(positions, rows, num_rows, WIDTH, WINDOW, CHUNKED)
    equal = tl.cdiv(tl.cdiv(context, MAX_SPLITS), _SPLIT_MULTIPLE) * _SPLIT_MULTIPLE
    length = tl.where(context <= MAX_SPLITS * SPLIT, SPLIT, tl.maximum(equal, SPLIT))
    return context, length, tl.cdiv(context, length)


@triton.jit(do_not_specialize=["num_rows", "room", "capacity"])
def _plan_kernel(
    positions, units, count, splits, num_rows, room, capacity,
    WIDTH: tl.constexpr, WINDOW: tl.constexpr, CHUNKED: tl.constexpr, SPLIT: tl.constexpr,
    MAX_SPLITS: tl.constexpr, SPLITS_PAD: tl.constexpr, ROWS: tl.constexpr,
):  # fmt: skip
    """Each program writes the lines of `units` of one row: its splits.

    Lines are ordered by length, the longest first; of equal lengths, full splits come before the
    last splits of rows (tails), and lower rows come first. A program finds where its lines go by
    counting the splits of all rows that come before them. A row has a number of full splits of one
    length, which stand together, and one tail, because no context is empty.
    """
    row = tl.program_id(0)
    plan_row = row + tl.arange(0, 1)
    cut = _cut(positions, plan_row, num_rows, room, WIDTH, WINDOW, CHUNKED, SPLIT, MAX_SPLITS)
    context, length, number = tl.max(cut[0], 0), tl.max(cut[1], 0), tl.max(cut[2], 0)
    tail = context - (number - 1) * length
    whole_index = 0  # the splits before this row's first full one
    tail_index = 0  # the splits before this row's tail
    total = 0
    for first in range(0, num_rows, ROWS):
        rows = first + tl.arange(0, ROWS)
        contexts, lengths, numbers = _cut(
            positions, rows, num_rows, room, WIDTH, WINDOW, CHUNKED, SPLIT, MAX_SPLITS
        )
        before = rows < row
        present = (rows < num_rows).to(tl.int32)  # the rows that exist, each with one tail
        wholes = tl.maximum(numbers - 1, 0)
        tails = contexts - (numbers - 1) * lengths
        longer = (lengths > length) | ((lengths == length) & before)
        whole_index += tl.sum(wholes * longer.to(tl.int32) + present * (tails > length), 0)
        longer = (tails > tail) | ((tails == tail) & before)
        tail_index += tl.sum(wholes * (lengths >= tail) + present * longer.to(tl.int32), 0)
        total += tl.sum(numbers, 0)
    tl.store(splits + row, number)
    if row == 0:
        tl.store(count, total)
    split = tl.arange(0, SPLITS_PAD)
    index = tl.where(split == number - 1, tail_index, whole_index + split)
    unit = units + index * UNIT_FIELDS
    mask = split < number
    tl.store(unit, row + tl.zeros_like(split), mask=mask)
    begin = 0
    if WINDOW is not None:
        begin = tl.max(_begin(positions, plan_row, num_rows, WIDTH, WINDOW, CHUNKED), 0)
    tl.store(unit + 1, split * length + begin, mask=mask)
    tl.store(unit + 2, tl.minimum((split + 1) * length, context) + begin, mask=mask)
    tl.store(unit + 3, tl.where(number > 1, row * capacity + split, -1), mask=mask)
