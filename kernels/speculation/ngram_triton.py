"""The operations of `NgramIndex` in Triton, one launch each. `ngram.py` calls `append` and
`propose`."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from batchgen.kernels.speculation.ngram_table import EXTEND, FINISH, NgramTable

_EXTEND = tl.constexpr(EXTEND)
_FINISH = tl.constexpr(FINISH)
_TOKENS = 128
"""Tokens per program of `_append`."""
_SIZES = ["width", "stride", "num_tokens", "max_len", "bucket_mask", "last_stamp"]
"""Integer arguments that Triton must not specialise on, or it would compile kernels again."""
_INPUTS = ["store_rows_ptr", "starts_ptr", "ids_ptr", "counts_ptr"]
"""Pointers whose alignment Triton must not specialise on, because they may be parts of larger
tensors."""


def append(
    table: NgramTable, store_rows: Tensor, starts: Tensor, token_ids: Tensor, counts: Tensor
) -> None:
    """Compute `NgramIndex.append` in one launch: store the first `counts` [R] of each row's new
    tokens [R, W] from its position `starts` [R] on. Each token has a lane of a program."""
    rows, width = token_ids.shape
    assert store_rows.is_contiguous() and starts.is_contiguous() and counts.is_contiguous()
    assert token_ids.stride(1) == 1 or width == 1
    assert rows * width < 2**31 - _TOKENS
    if rows * width:
        _append[(triton.cdiv(rows * width, _TOKENS),)](
            table.tokens, table.lengths, table.entries, table.clock, store_rows, starts, token_ids,
            counts, rows * width, width, token_ids.stride(0), table.tokens.shape[1],
            len(table.entries) - 1, table.last_stamp, MIN_N=table.min_n, MAX_N=table.max_n,
            POOL=table.pool, POSITION_BITS=table.position_bits, ROW_BITS=table.row_bits,
            BLOCK=_TOKENS, num_warps=4,
        )  # fmt: skip


def propose(table: NgramTable, store_rows: Tensor, k: int) -> tuple[Tensor, Tensor]:
    """Compute `NgramIndex.propose` in one launch, with a program for each row and a lane for each
    key: drafts [B, k] int64 and their numbers [B] int32. A key is an n-gram length, and whether the
    row itself or any row is searched."""
    assert store_rows.is_contiguous() and k > 0
    rows, keys = len(store_rows), (table.max_n - table.min_n + 1) * (1 + table.pool)
    drafts = torch.empty((rows, k), dtype=torch.int64, device=store_rows.device)
    num_drafts = torch.empty(rows, dtype=torch.int32, device=store_rows.device)
    if rows:
        _propose[(rows,)](
            table.tokens, table.lengths, table.entries, store_rows, drafts, num_drafts,
            table.tokens.shape[1], len(table.entries) - 1, K=k, K_BLOCK=triton.next_power_of_2(k),
            MIN_N=table.min_n, MAX_N=table.max_n, POOL=table.pool,
            POSITION_BITS=table.position_bits, ROW_BITS=table.row_bits,
            KEYS=triton.next_power_of_2(keys), BACK=triton.next_power_of_2(table.max_n),
            num_warps=1,
        )  # fmt: skip
    return drafts, num_drafts


@triton.jit
def _extend(state, token):
    """Return the hash of an n-gram, from the hash of its last n - 1 tokens and the token before
    them."""
    state = (state + token + 1) * _EXTEND
    return state ^ ((state >> 33) & 0x7FFFFFFF)


@triton.jit
def _bucket(state, salt, n, bucket_mask):
    """Return the index of an n-gram in `entries`; the salt is 1 + store row, or 0 if shared."""
    state = (state + (salt * 16 + n)) * _FINISH
    return (state ^ ((state >> 33) & 0x7FFFFFFF)) & bucket_mask


@triton.jit
def _take_stamp(clock_ptr, last_stamp):
    """Return the stamp of this launch. The last program to read the clock raises it for the next
    launch."""
    stamp = tl.load(clock_ptr)
    tl.debug_barrier()
    if tl.atomic_add(clock_ptr + 1, 1, sem="acq_rel") == tl.num_programs(0) - 1:
        tl.store(clock_ptr, stamp + 1)
        tl.store(clock_ptr + 1, 0)
    return tl.minimum(stamp, last_stamp)


@triton.jit(do_not_specialize=_SIZES, do_not_specialize_on_alignment=_INPUTS)
def _append(
    tokens_ptr, lengths_ptr, entries_ptr, clock_ptr, store_rows_ptr, starts_ptr, ids_ptr,
    counts_ptr, num_tokens, width, stride, max_len, bucket_mask, last_stamp,
    MIN_N: tl.constexpr, MAX_N: tl.constexpr, POOL: tl.constexpr, POSITION_BITS: tl.constexpr,
    ROW_BITS: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Each program stores `BLOCK` tokens and their n-grams. It reads only tokens that no program
    writes."""
    stamp = _take_stamp(clock_ptr, last_stamp)
    lane = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    row, step = lane // width, lane % width
    inside = lane < num_tokens
    store_row = tl.load(store_rows_ptr + row, mask=inside, other=0)
    start = tl.load(starts_ptr + row, mask=inside, other=0)
    count = tl.load(counts_ptr + row, mask=inside, other=0).to(tl.int64)
    count = tl.minimum(count, max_len - start)
    new = inside & (step < count)
    position = start + step
    source = ids_ptr + row.to(tl.int64) * stride + step
    target = tokens_ptr + store_row * max_len + position
    tl.store(target, tl.load(source, mask=new, other=0).to(tl.int32), mask=new)
    tl.store(lengths_ptr + store_row, (start + count).to(tl.int32), mask=new & (step == 0))

    packed = (((stamp << ROW_BITS) | store_row) << POSITION_BITS) | position
    state = tl.zeros((BLOCK,), tl.int64)
    for n in tl.static_range(1, MAX_N + 1):
        known = new & (position >= n)
        token = tl.load(source - n, mask=known & (step >= n), other=0)
        older = tl.load(target - n, mask=known & (step < n), other=0).to(tl.int64)
        state = _extend(state, tl.where(step >= n, token, older))
        if n >= MIN_N:
            own_bucket = _bucket(state, store_row + 1, n, bucket_mask)
            tl.atomic_max(entries_ptr + own_bucket, packed, mask=known, sem="relaxed")
            if POOL:
                shared = _bucket(state, tl.zeros_like(store_row), n, bucket_mask)
                tl.atomic_max(entries_ptr + shared, packed, mask=known, sem="relaxed")


@triton.jit(do_not_specialize=_SIZES, do_not_specialize_on_alignment=_INPUTS)
def _propose(
    tokens_ptr, lengths_ptr, entries_ptr, store_rows_ptr, drafts_ptr, num_drafts_ptr, max_len,
    bucket_mask, K: tl.constexpr, K_BLOCK: tl.constexpr, MIN_N: tl.constexpr, MAX_N: tl.constexpr,
    POOL: tl.constexpr, POSITION_BITS: tl.constexpr, ROW_BITS: tl.constexpr, KEYS: tl.constexpr,
    BACK: tl.constexpr,
):  # fmt: skip
    """Each program drafts for one row, from the most preferred key that hits."""
    row = tl.program_id(0).to(tl.int64)
    store_row = tl.load(store_rows_ptr + row)
    length = tl.load(lengths_ptr + store_row)
    end = tokens_ptr + store_row * max_len + length
    # In the order of preference: longer n-grams first, and of one length the row before others.
    key = tl.arange(0, KEYS)
    n = MAX_N - key // (1 + POOL)
    is_own = key % (1 + POOL) == 0
    state = tl.zeros((KEYS,), tl.int64)
    ngram = state
    for back in tl.static_range(1, MAX_N + 1):
        state = _extend(state, tl.load(end - back, mask=length >= back, other=0).to(tl.int64))
        ngram = tl.where(n == back, state, ngram)
    bucket = _bucket(ngram, tl.where(is_own, store_row + 1, 0), n, bucket_mask)
    known = (n >= MIN_N) & (n <= length)
    entry = tl.load(entries_ptr + bucket, mask=known, other=0)

    position = (entry & ((1 << POSITION_BITS) - 1)).to(tl.int32)
    source = (entry >> POSITION_BITS) & ((1 << ROW_BITS) - 1)
    inside = known & (position >= n) & ((source == store_row) | (is_own == 0))
    # How many tokens of the source are known from the position after the n-gram on.
    rest = tl.load(lengths_ptr + source, mask=inside, other=0) - position
    source_end = tokens_ptr + source * max_len + position
    back = 1 + tl.arange(0, BACK)[None, :]
    compared = inside[:, None] & (back <= n[:, None])
    theirs = tl.load(source_end[:, None] - back, mask=compared, other=0)
    ours = tl.load(end - back, mask=back <= length, other=0)
    different = tl.sum((compared & (theirs != ours)).to(tl.int32), axis=1)
    holds = inside & (rest > 0) & (different == 0)

    best = tl.min(tl.where(holds, key, KEYS), axis=0)
    source = tl.sum(tl.where(key == best, source, 0), axis=0)
    position = tl.sum(tl.where(key == best, position, 0), axis=0)
    rest = tl.sum(tl.where(key == best, rest, 0), axis=0)  # 0: nothing found
    # In the row itself drafts continue with the drafts themselves, by the % below.
    num_drafts = tl.where((rest > 0) & (source == store_row), K, tl.minimum(rest, K))
    tl.store(num_drafts_ptr + row, num_drafts)
    ahead = tl.arange(0, K_BLOCK)
    start = tokens_ptr + source * max_len + position
    drafted = ahead < num_drafts
    draft = tl.load(start + ahead % tl.maximum(rest, 1), mask=drafted, other=0)
    last = tl.load(end - 1, mask=length > 0, other=0)
    draft = tl.where(drafted, draft, last).to(tl.int64)
    tl.store(drafts_ptr + row * K + ahead, draft, mask=ahead < K)
