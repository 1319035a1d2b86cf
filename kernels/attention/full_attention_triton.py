"""Attention without a mask, within segments of the tokens, in Triton for Hopper.

This is FlashAttention-2 (Dao 2023), one program per tile of queries of a segment and head. Heads
are not padded to a power of two: 72 columns are multiplied as 64 and 16, of which 8 are zeros. The
copy engine (TMA) reads keys and values, and zeros past a head's columns.

A query visits tiles of keys in order, which begin where its segment does. Keys past the segment's
end have no weight, and their values count as zeros. So a result's bits do not depend on the other
segments, even if those hold NaN. The reference is `full_attention` on a CPU.
"""

from __future__ import annotations

import math

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.tools.tensor_descriptor import TensorDescriptor

from batchgen.kernels.attention.split_combine import accumulate_dot

_BLOCK_M, _BLOCK_N = 128, 64
"""The queries and the keys of a tile."""
_FEW_COLUMNS = 80
"""The most columns for which four warps have enough registers. They are faster than eight."""
_LEAST_COLUMNS = 16
"""The fewest columns of a matrix product."""
MOST_COLUMNS = 128
"""The most columns of a head that the kernel takes."""


def full_attention_triton(
    q: Tensor,  # [T, heads, D], contiguous, 16 bits
    k: Tensor,  # [heads, T, D], contiguous
    v: Tensor,  # [heads, T, D], contiguous
    starts: Tensor,  # [segments + 1] int32: where each segment begins, and the end of all
    longest: int,  # tokens of the longest segment
    scale: float,  # above 0
) -> Tensor:
    """Compute softmax(q·kᵀ · scale)·v for each query over all keys of its segment, in one launch.

    D is a multiple of 8, at most `MOST_COLUMNS`. Returns [T, heads, D] in q's dtype; scores and
    sums are float32.
    """
    tokens, heads, head_dim = q.shape
    assert head_dim % 8 == 0 and head_dim <= MOST_COLUMNS and scale > 0
    assert q.is_contiguous() and k.is_contiguous() and v.is_contiguous()
    assert k.shape == v.shape == (heads, tokens, head_dim) and k.dtype == v.dtype == q.dtype
    first, rest = _columns(head_dim)
    operands = [
        TensorDescriptor.from_tensor(part.flatten(0, 1), [_BLOCK_N, width]) if width else None
        for part in (k, v)
        for width in (first, rest)
    ]
    out = torch.empty_like(q)
    tiles = triton.cdiv(longest, _BLOCK_M)
    _segments_kernel[(tiles * heads * (len(starts) - 1),)](
        q, *operands, v, out, starts, tokens, tiles, scale * math.log2(math.e),
        NUM_HEADS=heads, HEAD_DIM=head_dim, FIRST=first, REST=rest,
        BLOCK_M=_BLOCK_M, BLOCK_N=_BLOCK_N, INTERPRETED=not q.is_cuda,
        num_warps=4 if first + rest <= _FEW_COLUMNS else 8, num_stages=3,
    )  # fmt: skip
    return out


def _columns(head_dim: int) -> tuple[int, int]:
    """Cut a head into columns of two products, 72 into (64, 16). The second number is 0 if one
    product, padded to a power of two, is no wider."""
    whole = max(_LEAST_COLUMNS, triton.next_power_of_2(head_dim))
    first = whole // 2
    rest = max(_LEAST_COLUMNS, triton.next_power_of_2(head_dim - first))
    return (first, rest) if rest < first and head_dim < whole else (whole, 0)


@triton.jit
def _values_of_segment(
    v_ptr, row, seen, first, HEAD_DIM: tl.constexpr, COLUMNS: tl.constexpr
):  # fmt: skip
    """Load COLUMNS columns, from `first` on, of the values at and after `row`: zeros for rows that
    are not `seen`, and past the head.

    The copy engine cannot do this, because it knows no segments. Triton 3.6 compiles a replacement
    of its values by zeros in registers to an illegal memory access.
    """
    rows = row.to(tl.int64) + tl.arange(0, seen.shape[0])
    columns = first + tl.arange(0, COLUMNS)
    inside = seen[:, None] & (columns < HEAD_DIM)[None, :]
    return tl.load(v_ptr + rows[:, None] * HEAD_DIM + columns[None, :], mask=inside, other=0.0)


@triton.jit
def _attend_tile(
    acc, acc_rest, top, total, q, q_rest, k, k_rest, v, v_rest, v_ptr, row, start, length,
    scale_log2, HEAD_DIM: tl.constexpr, FIRST: tl.constexpr, REST: tl.constexpr,
    BLOCK_N: tl.constexpr, MASKED: tl.constexpr, INTERPRETED: tl.constexpr,
):  # fmt: skip
    """Add the keys from `start` to start + BLOCK_N - 1 of a segment to a tile of queries.

    The segment begins at `row` of the keys; with MASKED, only its first `length` keys count.
    """
    row += start
    score = tl.zeros([q.shape[0], BLOCK_N], tl.float32)
    if REST:
        score = accumulate_dot(q_rest, tl.trans(k_rest.load([row, FIRST])), score, INTERPRETED)
    score = accumulate_dot(q, tl.trans(k.load([row, 0])), score, INTERPRETED)
    if MASKED:
        seen = start + tl.arange(0, BLOCK_N) < length
        score = tl.where(seen[None, :], score, float("-inf"))
    peak = tl.maximum(top, tl.max(score, 1) * scale_log2)
    weight = tl.exp2(score * scale_log2 - peak[:, None])
    rescale = tl.exp2(top - peak)
    total = total * rescale + tl.sum(weight, 1)
    weight = weight.to(q.dtype)
    if MASKED:
        values = _values_of_segment(v_ptr, row, seen, 0, HEAD_DIM, FIRST)
    else:
        values = v.load([row, 0])
    acc = accumulate_dot(weight, values, acc * rescale[:, None], INTERPRETED)
    if REST:
        if MASKED:
            more = _values_of_segment(v_ptr, row, seen, FIRST, HEAD_DIM, REST)
        else:
            more = v_rest.load([row, FIRST])
        acc_rest = accumulate_dot(weight, more, acc_rest * rescale[:, None], INTERPRETED)
    return acc, acc_rest, peak, total


@triton.jit(do_not_specialize=["num_tokens", "tiles"])
def _segments_kernel(
    q_ptr, k, k_rest, v, v_rest, v_ptr, out_ptr, starts_ptr, num_tokens, tiles, scale_log2,
    NUM_HEADS: tl.constexpr, HEAD_DIM: tl.constexpr, FIRST: tl.constexpr, REST: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, INTERPRETED: tl.constexpr,
):  # fmt: skip
    """Each program computes BLOCK_M queries of one segment and head. The grid has as many tiles for
    each segment as the longest needs; programs past a segment's end do nothing. Names that end in
    `rest` are those of the second columns (`_columns`)."""
    tile = tl.program_id(0) % tiles
    head = tl.program_id(0) // tiles % NUM_HEADS
    segment = tl.program_id(0) // tiles // NUM_HEADS
    begin = tl.load(starts_ptr + segment)
    length = tl.load(starts_ptr + segment + 1) - begin
    if tile * BLOCK_M >= length:
        return
    m = tile * BLOCK_M + tl.arange(0, BLOCK_M)
    of_head = (begin.to(tl.int64) + m) * NUM_HEADS + head
    dim = tl.arange(0, FIRST)
    offset = of_head[:, None] * HEAD_DIM + dim[None, :]
    inside = (m < length)[:, None] & (dim < HEAD_DIM)[None, :]
    q = tl.load(q_ptr + offset, mask=inside, other=0.0)
    q_rest = None
    acc_rest = 0.0
    if REST:
        dim = FIRST + tl.arange(0, REST)
        offset_rest = of_head[:, None] * HEAD_DIM + dim[None, :]
        inside_rest = (m < length)[:, None] & (dim < HEAD_DIM)[None, :]
        q_rest = tl.load(q_ptr + offset_rest, mask=inside_rest, other=0.0)
        acc_rest = tl.zeros([BLOCK_M, REST], tl.float32)

    acc = tl.zeros([BLOCK_M, FIRST], tl.float32)
    top = tl.full([BLOCK_M], float("-inf"), tl.float32)
    total = tl.zeros([BLOCK_M], tl.float32)
    row = head * num_tokens + begin
    full = length // BLOCK_N * BLOCK_N
    for start in tl.range(0, full, BLOCK_N):
        acc, acc_rest, top, total = _attend_tile(
            acc, acc_rest, top, total, q, q_rest, k, k_rest, v, v_rest, v_ptr, row, start, length,
            scale_log2, HEAD_DIM, FIRST, REST, BLOCK_N, MASKED=False, INTERPRETED=INTERPRETED,
        )  # fmt: skip
    for start in tl.range(full, length, BLOCK_N):
        acc, acc_rest, top, total = _attend_tile(
            acc, acc_rest, top, total, q, q_rest, k, k_rest, v, v_rest, v_ptr, row, start, length,
            scale_log2, HEAD_DIM, FIRST, REST, BLOCK_N, MASKED=True, INTERPRETED=INTERPRETED,
        )  # fmt: skip

    dtype = out_ptr.dtype.element_ty
    tl.store(out_ptr + offset, (acc / total[:, None]).to(dtype), mask=inside)
    if REST:
        tl.store(out_ptr + offset_rest, (acc_rest / total[:, None]).to(dtype), mask=inside_rest)
