"""The most likely tokens and their log-probabilities, without a sort (`candidates_triton`)."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from batchgen.kernels.sampling.candidates_triton import (
    TILES,
    ZERO_BITS,
    CandidateTiles,
    bound_of,
    image_of,
    list_groups,
    load_members,
    row_totals,
    search_members,
    summarise_chunk,
    value_of,
)
from batchgen.kernels.sampling.sampling_triton import ROW_ARGUMENTS, processed_logit


def top_logprobs_triton(
    logits: Tensor,  # [R, V]
    raw: Tensor,  # [R, V]
    temperature: Tensor,  # [R] float32
    threshold: Tensor | None,  # [R] float32
    processed_logprobs: Tensor,  # [R] bool
    k: int,
    *,
    tiles: CandidateTiles = TILES,
) -> tuple[Tensor, Tensor]:
    """Compute `sampling.top_logprobs` for k in [1, 256]: the ids [R, k] int32 of the most likely
    tokens, the most likely first, and their log-probabilities [R, k] float32. Where fewer than k
    are allowed, -1 and -inf follow.

    Other arguments are those of `sampling_triton.draw_triton`; `processed_logprobs` is not None.
    """
    rows, vocab = logits.shape
    assert 1 <= k <= 256 and vocab < 2**24
    assert logits.stride(1) == 1 and raw.stride(1) == 1 and raw.shape == logits.shape
    device = logits.device
    groups = triton.cdiv(vocab, tiles.group)
    summary = torch.empty((2, rows, groups), dtype=torch.float32, device=device)
    listed = torch.empty((rows, groups), dtype=torch.int32, device=device)
    ids = torch.empty((rows, k), dtype=torch.int32, device=device)
    values = torch.empty((rows, k), dtype=torch.float32, device=device)
    tile = max(16, triton.next_power_of_2(2 * k))
    candidates = torch.empty((2, rows, tile), dtype=torch.int32, device=device)
    # A pointer must be given even where the kernel does not read it.
    limits = temperature if threshold is None else threshold
    arguments = (
        logits, raw, temperature, limits, processed_logprobs, summary[0], summary[1],
        logits.stride(0), raw.stride(0), vocab, groups,
    )  # fmt: skip
    filtered = threshold is not None
    _summarise[(rows, triton.cdiv(vocab, tiles.chunk))](
        *arguments, FILTERED=filtered, GROUP=tiles.group, CHUNK=tiles.chunk, num_warps=8
    )
    _top_logprobs[(rows,)](
        *arguments, listed, candidates[0], candidates[1].view(torch.float32), ids, values, k,
        FILTERED=filtered, BITS=ZERO_BITS[logits.dtype], RAW_BITS=ZERO_BITS[raw.dtype], TILE=tile,
        GROUP=tiles.group, BLOCK=tiles.block, num_warps=16,
    )  # fmt: skip
    return ids, values


@triton.jit(do_not_specialize_on_alignment=[*ROW_ARGUMENTS, "weights_ptr"])
def _summarise(
    logits_ptr, raw_ptr, temperature_ptr, threshold_ptr, mode_ptr, maxima_ptr, weights_ptr,
    stride, raw_stride, vocab, groups,
    FILTERED: tl.constexpr, GROUP: tl.constexpr, CHUNK: tl.constexpr,
):  # fmt: skip
    """Each program summarises one chunk of one row: of its processed logits, or of the raw ones."""
    row = tl.program_id(0).to(tl.int64)
    maxima_ptr += row * groups
    weights_ptr += row * groups
    if tl.load(mode_ptr + row) != 0:
        limit = -float("inf")
        if FILTERED:
            limit = tl.load(threshold_ptr + row)
        summarise_chunk(
            logits_ptr + row * stride, maxima_ptr, weights_ptr, tl.program_id(1), vocab, limit,
            tl.load(temperature_ptr + row), GROUP, CHUNK,
        )  # fmt: skip
    else:
        summarise_chunk(
            raw_ptr + row * raw_stride, maxima_ptr, weights_ptr, tl.program_id(1), vocab,
            -float("inf"), 1.0, GROUP, CHUNK,
        )  # fmt: skip


@triton.jit(
    do_not_specialize=["k"],
    do_not_specialize_on_alignment=[*ROW_ARGUMENTS, "weights_ptr"],
)
def _top_logprobs(
    logits_ptr, raw_ptr, temperature_ptr, threshold_ptr, mode_ptr, maxima_ptr, weights_ptr,
    stride, raw_stride, vocab, groups, listed_ptr, found_ids_ptr, found_values_ptr,
    ids_ptr, values_ptr, k,
    FILTERED: tl.constexpr, BITS: tl.constexpr, RAW_BITS: tl.constexpr,
    TILE: tl.constexpr, GROUP: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Each program finds the tokens of one row, and stores them in order."""
    row = tl.program_id(0).to(tl.int64)
    maxima_ptr += row * groups
    weights_ptr += row * groups
    listed_ptr += row * groups
    found_ids_ptr += row * TILE
    found_values_ptr += row * TILE
    if tl.load(mode_ptr + row) != 0:
        limit = -float("inf")
        if FILTERED:
            limit = tl.load(threshold_ptr + row)
        temperature = tl.load(temperature_ptr + row)
        above, ties = _collect(
            logits_ptr + row * stride, maxima_ptr, weights_ptr, listed_ptr, vocab, groups, k,
            limit, temperature, found_ids_ptr, found_values_ptr, BITS, TILE, GROUP, BLOCK,
        )  # fmt: skip
    else:
        above, ties = _collect(
            raw_ptr + row * raw_stride, maxima_ptr, weights_ptr, listed_ptr, vocab, groups, k,
            -float("inf"), 1.0, found_ids_ptr, found_values_ptr, RAW_BITS, TILE, GROUP, BLOCK,
        )  # fmt: skip
    tl.debug_barrier()
    _store_in_order(
        found_ids_ptr, found_values_ptr, above, ties, ids_ptr + row * k, values_ptr + row * k, k,
        TILE,
    )  # fmt: skip


@triton.jit
def _collect(
    ptr, maxima_ptr, weights_ptr, listed_ptr, vocab, groups, k, limit, temperature, ids_ptr,
    values_ptr, BITS: tl.constexpr, TILE: tl.constexpr, GROUP: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Find the tokens above the k-th largest log-probability, and the first k tokens that equal it.

    Tokens whose logit is below `limit` are left out. The tokens above, at most k - 1, are written
    from the start of the row's [TILE] buffers on, the equal ones from the end backwards. Returns
    both counts.
    """
    top, total = row_totals(maxima_ptr, weights_ptr, groups, temperature, BLOCK)
    log_total = tl.log(total)
    high = processed_logit(top, top, temperature)
    wanted = tl.minimum(k, vocab).to(tl.float32)
    bound = bound_of(
        maxima_ptr, weights_ptr, groups, wanted, total, top, temperature, MASS=False, BLOCK=BLOCK
    )
    # Compare tokens as log-probabilities: rounding may make different logits equal.
    minimum = processed_logit(tl.maximum(bound, limit), top, temperature) - high - log_total
    members = list_groups(
        maxima_ptr, listed_ptr, groups, minimum, high, log_total, top, temperature, GROUP, BLOCK
    )
    image = search_members(
        ptr, listed_ptr, members, vocab, image_of(bound, BITS).to(tl.int64), wanted, total, top,
        temperature, MASS=False, BITS=BITS, GROUP=GROUP, BLOCK=BLOCK,
    )  # fmt: skip
    last = tl.maximum(value_of(image, BITS), limit)  # the limit, if fewer than k reach it
    minimum = processed_logit(last, top, temperature) - high - log_total
    above = 0
    ties = 0
    for start in range(0, members, BLOCK):
        columns, values = load_members(ptr, listed_ptr, start, members, vocab, GROUP, BLOCK)
        scaled = processed_logit(values, top, temperature) - high - log_total
        kept = (values >= limit) & (values > -float("inf"))
        more = (kept & (scaled > minimum)).to(tl.int32)
        same = (kept & (scaled == minimum)).to(tl.int32)
        num_more = tl.sum(more, axis=0)
        num_same = tl.sum(same, axis=0)
        if num_more + num_same > 0:
            target = above + tl.cumsum(more, axis=0) - 1
            tie = ties + tl.cumsum(same, axis=0) - 1
            target = tl.where(more != 0, target, TILE - 1 - tie)
            write = (more != 0) | ((same != 0) & (tie < k))
            tl.store(ids_ptr + target, columns, mask=write)
            tl.store(values_ptr + target, scaled, mask=write)
            above += num_more
            ties += num_same
    return above, tl.minimum(ties, k)


@triton.jit
def _store_in_order(
    found_ids_ptr, found_values_ptr, above, ties, ids_ptr, values_ptr, k, TILE: tl.constexpr
):
    """Write the first k of the tokens found, ordered by log-probability and then id, then -1 and
    -inf."""
    index = tl.arange(0, TILE)
    filled = (index < above) | (index >= TILE - ties)
    ids = tl.load(found_ids_ptr + index, mask=filled, other=0)
    values = tl.load(found_values_ptr + index, mask=filled, other=-float("inf"))
    rank = tl.zeros((TILE,), tl.int32)
    for start in range(0, TILE, 16):
        index2 = start + tl.arange(0, 16)
        filled2 = (index2 < above) | (index2 >= TILE - ties)
        ids2 = tl.load(found_ids_ptr + index2, mask=filled2, other=0)[None, :]
        values2 = tl.load(found_values_ptr + index2, mask=filled2, other=-float("inf"))[None, :]
        before = (values2 > values[:, None]) | (
            (values2 == values[:, None]) & (ids2 < ids[:, None])
        )
        rank += tl.sum((before & filled2[None, :]).to(tl.int32), axis=1)
    wanted = filled & (rank < k)
    tl.store(ids_ptr + rank, ids, mask=wanted)
    tl.store(values_ptr + rank, values, mask=wanted)
    missing = (index >= above + ties) & (index < k)
    tl.store(ids_ptr + index, tl.full((TILE,), -1, tl.int32), mask=missing)
    tl.store(values_ptr + index, tl.full((TILE,), -float("inf"), tl.float32), mask=missing)
