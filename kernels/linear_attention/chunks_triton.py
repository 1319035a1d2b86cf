"""Helpers of Triton kernels that go through rows in chunks: they find which row a program's chunk
belongs to, and which tokens it has. Rows have different lengths, which only the device knows."""

from __future__ import annotations

import triton
import triton.language as tl

_ROWS = tl.constexpr(128)
"""Rows that a program looks at together. It does not follow their number, so that a kernel is
compiled once."""


@triton.jit
def row_of_chunk(starts_ptr, index, num_rows, CHUNK: tl.constexpr):
    """Find the row that a chunk belongs to, and the chunk's number in it: row r has the chunks from
    starts[r] // CHUNK + 2 · r on, of which none may be there."""
    owner = tl.full((), -1, tl.int32)
    for begin in range(0, num_rows, _ROWS):
        row = begin + tl.arange(0, _ROWS)
        start = tl.load(starts_ptr + row, mask=row < num_rows, other=0)
        owner += tl.sum(((row < num_rows) & (start // CHUNK + 2 * row <= index)).to(tl.int32))
    return owner, index - (tl.load(starts_ptr + owner) // CHUNK + 2 * owner)


@triton.jit
def tokens_of_chunk(positions_ptr, start, end, chunk, CHUNK: tl.constexpr):
    """Find the first token of a chunk of the row [start, end), and how many it has; a row that
    starts within a chunk has the rest of that as its first one."""
    missing = tl.load(positions_ptr + start, mask=start < end, other=0).to(tl.int32) % CHUNK
    first = tl.maximum(start + chunk * CHUNK - missing, start)
    last = tl.minimum(start + (chunk + 1) * CHUNK - missing, end)
    return first, last - first
