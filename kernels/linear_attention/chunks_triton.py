"""Triton functions for kernels that go through rows in chunks: they find the row of a program's
chunk, and the chunk's tokens. Rows differ in length, and only the device knows the lengths."""

from __future__ import annotations

import triton
import triton.language as tl

_ROWS = tl.constexpr(128)
"""Rows that a program looks at together. It is a constant, whatever the number of rows, so that a
kernel is compiled once."""


@triton.jit
def row_of_chunk(starts_ptr, index, num_rows, CHUNK: tl.constexpr):
    """Return the row that a chunk belongs to, and the chunk's number in that row.

    Row r has the chunk indices from starts[r] // CHUNK + 2 · r on; some or all of them may have no
    tokens. The 2 · r leave room for a partial chunk at both ends of each row before it.
    """
    owner = tl.full((), -1, tl.int32)
    for begin in range(0, num_rows, _ROWS):
        row = begin + tl.arange(0, _ROWS)
        start = tl.load(starts_ptr + row, mask=row < num_rows, other=0)
        owner += tl.sum(((row < num_rows) & (start // CHUNK + 2 * row <= index)).to(tl.int32))
    return owner, index - (tl.load(starts_ptr + owner) // CHUNK + 2 * owner)


@triton.jit
def tokens_of_chunk(positions_ptr, start, end, chunk, CHUNK: tl.constexpr):
    """Return the first token of a chunk of the row [start, end), and the number of its tokens.

    A row that starts within a chunk, by its position, has the rest of that chunk as its first one.
    """
    missing = tl.load(positions_ptr + start, mask=start < end, other=0).to(tl.int32) % CHUNK
    first = tl.maximum(start + chunk * CHUNK - missing, start)
    last = tl.minimum(start + (chunk + 1) * CHUNK - missing, end)
    return first, last - first
