"""A Triton function that adds up partial results of a row, such as those of a token's experts, in a
fixed order. The kernel that needs the sum calls it, so the sum takes no launch of its own."""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def sum_parts(
    parts_ptr, part_stride, row_stride, ids_ptr, experts, shared_ptr, gate_ptr, row, exists, column,
    mask, size, PARTS: tl.constexpr,
):  # fmt: skip
    """Return the sum of the parts of rows in float32, in the order of the parts.

    Part p of row r starts at parts[p · part_stride + r · row_stride]. If there are `ids`, parts
    whose expert ids[r, p] is not below `experts` are left out. The result of a shared expert
    (`SharedPart`) is added last. `row` int64, `column` int32 and `mask` (which values exist)
    broadcast together; `exists` masks rows, None for all; `size` is a row's length.
    """
    source = parts_ptr + row * row_stride + column
    total = tl.zeros(mask.shape, tl.float32)
    for part in tl.static_range(PARTS):
        here = mask
        if ids_ptr is not None:
            end = tl.where(tl.load(ids_ptr + row * PARTS + part) < experts, size, 0)
            here = mask & (column < end)
        total += tl.load(source + part * part_stride, mask=here, other=0.0).to(tl.float32)
    if shared_ptr is not None:
        shared = tl.load(shared_ptr + row * size + column, mask=mask, other=0.0).to(tl.float32)
        if gate_ptr is not None:
            gate = tl.load(gate_ptr + row, mask=exists).to(tl.float32)
            shared *= 1.0 / (1.0 + tl.exp(-gate))
        total += shared
    return total
