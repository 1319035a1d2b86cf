"""Top-k, top-p and min-p thresholds and the most likely tokens, without a sort.

One program per row looks for a threshold by bisection on the order-preserving integer image of the
logits: a pass over the row (from the L2 cache after the first) counts, or weighs, the tokens at or
above several pivots at once. The first pivots lie at growing distances below the maximum, where
thresholds are; the others split what is left evenly. Logits of 16 bits have 16-bit images, so three
or four passes find a value exactly; float32 takes up to eleven. Sums have a fixed order.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from batchgen.kernels.sampling_triton import ROW_ARGUMENTS, load_logits, processed_logit

_BLOCK = 2048
"""Fixed, as the number of warps is: a row's sums must not depend on how many rows there are."""
_PIVOTS = tl.constexpr(8)
_LOWEST = tl.constexpr(-2139095041)  # the image of -inf in float32
_ZERO_BITS = {torch.float32: 0, torch.bfloat16: 16, torch.float16: 13}
"""Low bits that are zero in a float32 of this type's values."""


def thresholds(
    logits: Tensor, temperature: Tensor, top_k: Tensor, top_p: Tensor, min_p: Tensor
) -> Tensor:
    """The lowest logit of each row that top-k, top-p and min-p keep.

    As `filter_top_k_top_p_min_p` after `apply_temperature`: tokens that tie with the last one kept
    are kept, also where only rounding by the temperature makes the tie.

    Args:
        logits: [R, V] bfloat16, float16 or float32, V < 2²⁴; columns contiguous.
        temperature, top_p, min_p: [R] float32.
        top_k: [R] int64.

    Returns:
        [R] float32 in the scale of `logits`; -inf for rows without a filter.
    """
    rows, vocab = logits.shape
    assert logits.stride(1) == 1 and vocab < 2**24
    out = torch.empty(rows, dtype=torch.float32, device=logits.device)
    _thresholds[(rows,)](
        logits, temperature, top_k, top_p, min_p, out, logits.stride(0), vocab,
        ZERO_BITS=_ZERO_BITS[logits.dtype], BLOCK=_BLOCK, num_warps=16,
    )  # fmt: skip
    return out


def top_logprobs(
    logits: Tensor,
    raw: Tensor,
    temperature: Tensor,
    threshold: Tensor | None,
    processed_logprobs: Tensor,
    k: int,
) -> tuple[Tensor, Tensor]:
    """The k most likely tokens of each row, most likely first, of equal ones the lowest id.

    Args:
        logits, raw, temperature, threshold, processed_logprobs: as for `draw`.
        k: in [1, 256].

    Returns:
        As `kernels.sampling.top_logprobs`: ids [R, k] int32 and log-probabilities [R, k] float32.
    """
    rows, vocab = logits.shape
    assert 1 <= k <= 256 and vocab < 2**24
    assert logits.stride(1) == 1 and raw.stride(1) == 1 and raw.shape == logits.shape
    device = logits.device
    ids = torch.full((rows, k), -1, dtype=torch.int32, device=device)
    values = torch.full((rows, k), -float("inf"), dtype=torch.float32, device=device)
    tile = max(16, triton.next_power_of_2(2 * k))
    found = torch.empty((2, rows, tile), dtype=torch.int32, device=device)
    limits = temperature if threshold is None else threshold  # not read if there is none
    _top_logprobs[(rows,)](
        logits, raw, temperature, limits, processed_logprobs, ids, values,
        found[0], found[1].view(torch.float32), logits.stride(0), raw.stride(0), vocab, k,
        FILTERED=threshold is not None, BITS=_ZERO_BITS[logits.dtype],
        RAW_BITS=_ZERO_BITS[raw.dtype], TILE=tile, BLOCK=_BLOCK, num_warps=16,
    )  # fmt: skip
    return ids, values


@triton.jit
def _image(values, ZERO_BITS: tl.constexpr):
    """Integers in the order of float32 values."""
    bits = values.to(tl.int32, bitcast=True)
    return (bits ^ ((bits >> 31) & 0x7FFFFFFF)) >> ZERO_BITS


@triton.jit
def _value_of(image, ZERO_BITS: tl.constexpr):
    """The float32 value of an image (int64)."""
    bits = image << ZERO_BITS
    bits = tl.where(image < 0, (bits | ((1 << ZERO_BITS) - 1)) ^ 0x7FFFFFFF, bits)
    return bits.to(tl.int32).to(tl.float32, bitcast=True)


@triton.jit
def _row_maximum(ptr, vocab, BLOCK: tl.constexpr):
    top = tl.full((BLOCK,), -float("inf"), tl.float32)
    for start in range(0, vocab, BLOCK):
        top = tl.maximum(top, load_logits(ptr, start + tl.arange(0, BLOCK), vocab))
    return tl.max(top, axis=0)


@triton.jit
def _weight(values, top, temperature):
    """Probability relative to the row's most likely token."""
    weight = tl.exp((values - tl.where(top == -float("inf"), 0.0, top)) / temperature)
    return tl.where(values > -float("inf"), weight, 0.0)


@triton.jit
def _search(
    ptr, vocab, base, target, top, temperature,
    MASS: tl.constexpr, ZERO_BITS: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """The largest image t ≥ base such that the tokens from t on number `target`, or weigh the
    share `target` of the tokens from base on."""
    step = tl.arange(0, _PIVOTS)
    low = base
    high = _image(top, ZERO_BITS).to(tl.int64) + 1
    probes = top - temperature * tl.exp2(5.0 - step.to(tl.float32))
    pivots = _image(probes, ZERO_BITS).to(tl.int64)
    while high - low > 1:
        pivots = tl.where(step == 0, base, tl.minimum(tl.maximum(pivots, low), high))
        narrow = pivots.to(tl.int32)
        sums = tl.zeros((_PIVOTS, BLOCK), tl.float32)
        for start in range(0, vocab, BLOCK):
            values = load_logits(ptr, start + tl.arange(0, BLOCK), vocab)
            above = _image(values, ZERO_BITS)[None, :] >= narrow[:, None]
            if MASS:
                sums += tl.where(above, _weight(values, top, temperature)[None, :], 0.0)
            else:
                sums += tl.where(above, 1.0, 0.0)
        reached = tl.sum(sums, axis=1)
        enough = target
        if MASS:
            enough = target * tl.max(reached, axis=0)  # the first pivot's: all from base on
        met = (reached >= enough) | (pivots <= low)
        low = tl.max(tl.where(met, pivots, low), axis=0)
        high = tl.min(tl.where(met, high, pivots), axis=0)
        pivots = low + (high - low) * (step + 1) // (_PIVOTS + 1)
    return low


@triton.jit(do_not_specialize_on_alignment=ROW_ARGUMENTS)
def _thresholds(
    logits_ptr, temperature_ptr, top_k_ptr, top_p_ptr, min_p_ptr, out_ptr, stride, vocab,
    ZERO_BITS: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64)
    ptr = logits_ptr + row * stride
    temperature = tl.load(temperature_ptr + row)
    top_k = tl.load(top_k_ptr + row)
    top_p = tl.load(top_p_ptr + row)
    min_p = tl.load(min_p_ptr + row)
    limited = (top_k > 0) & (top_k < vocab)
    limit = -float("inf")
    if limited | (top_p < 1) | (min_p > 0):
        top = _row_maximum(ptr, vocab, BLOCK)
        image = tl.cast(_LOWEST >> ZERO_BITS, tl.int64)
        if limited:
            image = _search(
                ptr, vocab, image, top_k.to(tl.float32), top, temperature, False, ZERO_BITS, BLOCK
            )
        if top_p < 1:
            image = _search(ptr, vocab, image, top_p, top, temperature, True, ZERO_BITS, BLOCK)
        least = tl.where(min_p > 0, tl.log(min_p), -float("inf"))
        least += processed_logit(top, top, temperature)
        limit = tl.maximum(processed_logit(_value_of(image, ZERO_BITS), top, temperature), least)
        if temperature != 1:
            limit = _lowest_from(ptr, vocab, limit, top, temperature, BLOCK)
    tl.store(out_ptr + row, limit)


@triton.jit
def _lowest_from(ptr, vocab, limit, top, temperature, BLOCK: tl.constexpr):
    """The lowest logit of the row that the temperature takes to `limit` or above."""
    lowest = tl.full((BLOCK,), float("inf"), tl.float32)
    for start in range(0, vocab, BLOCK):
        values = load_logits(ptr, start + tl.arange(0, BLOCK), vocab)
        kept = processed_logit(values, top, temperature) >= limit
        lowest = tl.minimum(lowest, tl.where(kept, values, float("inf")))
    return tl.min(lowest, axis=0)


@triton.jit(do_not_specialize=["k"], do_not_specialize_on_alignment=ROW_ARGUMENTS)
def _top_logprobs(
    logits_ptr, raw_ptr, temperature_ptr, threshold_ptr, mode_ptr, ids_ptr, values_ptr,
    found_ids_ptr, found_values_ptr, stride, raw_stride, vocab, k,
    FILTERED: tl.constexpr, BITS: tl.constexpr, RAW_BITS: tl.constexpr,
    TILE: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64)
    ids_ptr += row * k
    values_ptr += row * k
    found_ids_ptr += row * TILE
    found_values_ptr += row * TILE
    if tl.load(mode_ptr + row) != 0:
        limit = -float("inf")
        if FILTERED:
            limit = tl.load(threshold_ptr + row)
        temperature = tl.load(temperature_ptr + row)
        above, ties = _collect(
            logits_ptr + row * stride, vocab, k, limit, temperature, found_ids_ptr,
            found_values_ptr, BITS, TILE, BLOCK,
        )  # fmt: skip
    else:
        above, ties = _collect(
            raw_ptr + row * raw_stride, vocab, k, -float("inf"), 1.0, found_ids_ptr,
            found_values_ptr, RAW_BITS, TILE, BLOCK,
        )  # fmt: skip
    tl.debug_barrier()
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


@triton.jit
def _collect(
    ptr, vocab, k, limit, temperature, ids_ptr, values_ptr,
    ZERO_BITS: tl.constexpr, TILE: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Find the tokens above the k-th log-probability, at most k - 1, and the first k equal to it.

    Tokens below the limit are left out. The former are written from the start of the tile, the
    latter from its end; returns how many there are of each.
    """
    top = _row_maximum(ptr, vocab, BLOCK)
    total = tl.zeros((BLOCK,), tl.float32)
    for start in range(0, vocab, BLOCK):
        values = load_logits(ptr, start + tl.arange(0, BLOCK), vocab)
        weight = _weight(values, top, temperature)
        total += tl.where(values >= limit, weight, 0.0)
    log_total = tl.log(tl.sum(total, axis=0))
    high = processed_logit(top, top, temperature)
    lowest = tl.cast(_LOWEST >> ZERO_BITS, tl.int64)
    wanted = tl.minimum(k, vocab).to(tl.float32)
    image = _search(ptr, vocab, lowest, wanted, top, temperature, False, ZERO_BITS, BLOCK)
    last = tl.maximum(_value_of(image, ZERO_BITS), limit)
    # Compared as log-probabilities: rounding may make equal what differed as logits.
    least = processed_logit(last, top, temperature) - high - log_total
    above = 0
    ties = 0
    for start in range(0, vocab, BLOCK):
        columns = start + tl.arange(0, BLOCK)
        values = load_logits(ptr, columns, vocab)
        scaled = processed_logit(values, top, temperature) - high - log_total
        kept = (values >= limit) & (values > -float("inf"))
        more = (kept & (scaled > least)).to(tl.int32)
        same = (kept & (scaled == least)).to(tl.int32)
        num_more = tl.sum(more, axis=0)
        num_same = tl.sum(same, axis=0)
        if num_more + num_same > 0:
            place = above + tl.cumsum(more, axis=0) - 1
            tie = ties + tl.cumsum(same, axis=0) - 1
            place = tl.where(more != 0, place, TILE - 1 - tie)
            write = (more != 0) | ((same != 0) & (tie < k))
            tl.store(ids_ptr + place, columns, mask=write)
            tl.store(values_ptr + place, scaled, mask=write)
            above += num_more
            ties += num_same
    return above, tl.minimum(ties, k)
