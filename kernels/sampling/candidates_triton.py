"""Finds a row's most likely tokens without a sort, by the maxima of small groups of columns.
Filters (`filter_triton.py`) and log-probabilities (`top_logprobs_triton.py`) use it.

A first pass over the logits, by many programs per row, writes the maximum and the weight of each
group of columns. A token's weight is its probability relative to that of the most likely token; a
group's weight is the sum over its tokens. Then one program per row works on these few thousand
numbers. It chooses a lower bound of the logits it looks for, lists the groups whose maximum reaches
the bound, and searches only the columns of these groups, its *members*. For example, the k-th
largest group maximum is a lower bound of the k-th largest logit, and only about k groups reach it.
Flat distributions take longer but remain correct.

A search is a bisection on *images*: integers in the order of the float32 values. Each pass counts
(or weighs, with MASS) the values at or above several pivots at once. The pivots of the first pass
lie 16 T, 8 T, … T/4 below the maximum (T is the temperature), where thresholds tend to be; those
of later passes divide what is left evenly. 16-bit logits have 16-bit images, so three or four
passes find a value exactly; float32 takes up to eleven. Sums have a fixed order.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
import triton
import triton.language as tl

from batchgen.kernels.sampling.sampling_triton import load_logits, processed_logit

ZERO_BITS = {torch.float32: 0, torch.bfloat16: 16, torch.float16: 13}
"""The number of low bits that are zero in a float32 which holds a value of the dtype."""
LOWEST = tl.constexpr(-2139095041)
"""The image of -inf in float32."""
_PIVOTS = tl.constexpr(8)
"""Pivots per pass."""
_COARSE = tl.constexpr(16)
"""Low bits of the image that `bound_of` ignores."""


class CandidateTiles(NamedTuple):
    """Sizes of the kernels, powers of two. They are fixed, so that sums do not depend on the
    batch."""

    group: int = 32  # columns; 32 of 16 bits are two sectors of a GPU's memory
    chunk: int = 4096  # columns that a program of the first pass reads
    block: int = 2048  # numbers that a row's program handles at a time


TILES = CandidateTiles()


@triton.jit
def summarise_chunk(
    ptr, maxima_ptr, weights_ptr, chunk, vocab, limit, temperature,
    GROUP: tl.constexpr, CHUNK: tl.constexpr,
):  # fmt: skip
    """Write the maximum and the weight of each group of one chunk. The weight is relative to the
    group's own maximum, and counts only logits from `limit` on."""
    groups: tl.constexpr = CHUNK // GROUP
    index = chunk * groups + tl.arange(0, groups)
    columns = index[:, None] * GROUP + tl.arange(0, GROUP)[None, :]
    values = load_logits(ptr, columns, vocab)
    maxima = tl.max(values, axis=1)
    weights = weight(values, maxima[:, None], 1 / temperature)
    weights = tl.sum(tl.where(values >= limit, weights, 0.0), axis=1)
    here = index < tl.cdiv(vocab, GROUP)
    tl.store(maxima_ptr + index, maxima, mask=here)
    tl.store(weights_ptr + index, weights, mask=here)


@triton.jit
def weight(values, top, inverse_temperature):
    """Return the probability of tokens relative to that of a token with the logit `top`."""
    shift = tl.where(top == -float("inf"), 0.0, top)
    return tl.where(values > -float("inf"), tl.exp((values - shift) * inverse_temperature), 0.0)


@triton.jit
def row_totals(maxima_ptr, weights_ptr, groups, temperature, BLOCK: tl.constexpr):
    """Return the maximum of a row, and the weight of all its tokens relative to that maximum."""
    tops = tl.full((BLOCK,), -float("inf"), tl.float32)
    for start in range(0, groups, BLOCK):
        index = start + tl.arange(0, BLOCK)
        maxima = tl.load(maxima_ptr + index, mask=index < groups, other=-float("inf"))
        tops = tl.maximum(tops, maxima)
    top = tl.max(tops, axis=0)
    sums = tl.zeros((BLOCK,), tl.float32)
    for start in range(0, groups, BLOCK):
        index = start + tl.arange(0, BLOCK)
        _, weights = _load_groups(
            maxima_ptr, weights_ptr, index, groups, top, 1 / temperature, MASS=True
        )
        sums += weights
    return top, tl.sum(sums, axis=0)


@triton.jit
def bound_of(
    maxima_ptr, weights_ptr, groups, target, total, top, temperature,
    MASS: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Return the largest value, rounded down to 16 bits, that the maxima of enough groups reach;
    -inf if there is none.

    Enough is `target` groups, or with MASS, groups whose weights sum to the share `target` of
    `total`. The image that is found lacks its low bits, and here they become those that make the
    value least: 0 in an image, which is all ones in the float32 of a negative value. `value_of`
    instead restores a value whose low bits are zero.
    """
    image = _search(
        maxima_ptr, weights_ptr, groups, 0, tl.cast(LOWEST >> _COARSE, tl.int64), target, total,
        top, temperature, MEMBERS=False, MASS=MASS, BITS=_COARSE, GROUP=1, BLOCK=BLOCK,
    )  # fmt: skip
    bits = image << _COARSE
    bound = tl.where(image < 0, bits ^ 0x7FFFFFFF, bits).to(tl.int32).to(tl.float32, bitcast=True)
    return tl.where(bound != bound, -float("inf"), bound)  # -inf without its last bits is a NaN


@triton.jit
def list_groups(
    maxima_ptr, listed_ptr, groups, minimum, high, log_total, top, temperature,
    GROUP: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """List the groups, in ascending order, whose maximum has a log-probability of at least
    `minimum`.

    A log-probability is a processed logit (after temperature) less `high`, that of the row's
    maximum `top`, and less `log_total`, the logarithm of the row's weight. A caller that passes 0
    for both gives `minimum` as a processed logit. Groups that are not listed have no member that
    reaches `minimum`. Returns the number of members.
    """
    tl.debug_barrier()  # other threads may still read an earlier list
    count = 0
    for start in range(0, groups, BLOCK):
        index = start + tl.arange(0, BLOCK)
        here = index < groups
        maxima = tl.load(maxima_ptr + index, mask=here, other=-float("inf"))
        scaled = processed_logit(maxima, top, temperature) - high - log_total
        listed = (here & (scaled >= minimum)).to(tl.int32)
        num_listed = tl.sum(listed, axis=0)
        if num_listed > 0:
            target = count + tl.cumsum(listed, axis=0) - 1
            tl.store(listed_ptr + target, index, mask=listed != 0)
            count += num_listed
    tl.debug_barrier()
    return count * GROUP


@triton.jit
def load_members(ptr, listed_ptr, start, members, vocab, GROUP: tl.constexpr, BLOCK: tl.constexpr):
    """Load the columns (ascending) and logits of BLOCK members from number `start` on; past the
    last member, `vocab` and -inf."""
    index = start + tl.arange(0, BLOCK)
    here = index < members
    groups = tl.load(listed_ptr + index // GROUP, mask=here, other=0)
    columns = tl.where(here, groups * GROUP + index % GROUP, vocab)
    return columns, load_logits(ptr, columns, vocab)


@triton.jit
def search_members(
    ptr, listed_ptr, members, vocab, base, target, total, top, temperature,
    MASS: tl.constexpr, BITS: tl.constexpr, GROUP: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Return the largest image t ≥ base such that enough members have an image of at least t.
    `base` is an image too, the least that the search considers.

    Enough is `target` members, or with MASS, members whose weights sum to the share `target` of
    `total`. A `total` of 0 stands for the weight of all members from `base` on. If even these are
    not enough, the result is the image of -inf.
    """
    return _search(
        ptr, listed_ptr, members, vocab, base, target, total, top, temperature,
        MEMBERS=True, MASS=MASS, BITS=BITS, GROUP=GROUP, BLOCK=BLOCK,
    )  # fmt: skip


@triton.jit
def value_of(image, BITS: tl.constexpr):
    """Return the float32 value, whose BITS lowest bits are zero, of an int64 image without its BITS
    lowest bits: the inverse of `image_of`."""
    bits = image << BITS
    bits = tl.where(image < 0, (bits | ((1 << BITS) - 1)) ^ 0x7FFFFFFF, bits)
    return bits.to(tl.int32).to(tl.float32, bitcast=True)


@triton.jit
def image_of(values, BITS: tl.constexpr):
    """Map float32 values to int32 images of equal order, without the BITS lowest bits."""
    bits = values.to(tl.int32, bitcast=True)
    return (bits ^ ((bits >> 31) & 0x7FFFFFFF)) >> BITS


@triton.jit
def _load_groups(
    maxima_ptr, weights_ptr, index, groups, top, inverse_temperature, MASS: tl.constexpr
):
    """Load the maxima of groups and their weights relative to `top`; without MASS each weight is
    1."""
    here = index < groups
    maxima = tl.load(maxima_ptr + index, mask=here, other=-float("inf"))
    weights = 1.0
    if MASS:
        weights = tl.load(weights_ptr + index, mask=here, other=0.0)
        weights *= weight(maxima, top, inverse_temperature)
    return maxima, weights


@triton.jit
def _search(
    ptr, other_ptr, size, vocab, base, target, total, top, temperature,
    MEMBERS: tl.constexpr, MASS: tl.constexpr, BITS: tl.constexpr, GROUP: tl.constexpr,
    BLOCK: tl.constexpr,
):  # fmt: skip
    """Search members as `search_members` describes; without MEMBERS search groups, by maxima and
    weights.

    The result is at least `low` and below `high` throughout: enough values reach `low`, and too few
    reach `high`. That `low` is reached is only known once the first pass has weighed the values
    from `base` on. If they are not enough, `high` becomes `low`, which ends the loop and says that
    there is no result.
    """
    inverse = 1 / temperature
    step = tl.arange(0, _PIVOTS)
    low = base
    # + 2, not + 1: the loop must run at least once, to weigh the values from `base` on.
    high = image_of(top, BITS).to(tl.int64) + 2
    probes = top - temperature * tl.exp2(5.0 - step.to(tl.float32))
    pivots = image_of(probes, BITS).to(tl.int64)
    while high - low > 1:
        # Pivot 0 is always `base`, because each pass needs what all values from `base` on weigh.
        pivots = tl.where(step == 0, base, tl.minimum(tl.maximum(pivots, low), high))
        narrow = pivots.to(tl.int32)
        sums = tl.zeros((_PIVOTS, BLOCK), tl.float32)
        for start in range(0, size, BLOCK):
            weights = 1.0
            if MEMBERS:
                _, values = load_members(ptr, other_ptr, start, size, vocab, GROUP, BLOCK)
                if MASS:
                    weights = weight(values, top, inverse)[None, :]
            else:
                index = start + tl.arange(0, BLOCK)
                values, weights = _load_groups(ptr, other_ptr, index, size, top, inverse, MASS)
                if MASS:
                    weights = weights[None, :]
            above = image_of(values, BITS)[None, :] >= narrow[:, None]
            sums += tl.where(above, weights, 0.0)
        reached = tl.sum(sums, axis=1)
        max_reached = tl.max(reached, axis=0)  # the weight, or number, of all values from `base` on
        enough = target
        if MASS:
            enough = target * tl.where(total > 0, total, max_reached)
        # Pivots at or below `low` add nothing; `met` keeps them from becoming `high`.
        met = (reached >= enough) | (pivots <= low)
        low = tl.max(tl.where(met, pivots, low), axis=0)
        high = tl.min(tl.where(met, high, pivots), axis=0)
        high = tl.where(max_reached >= enough, high, low)
        pivots = low + (high - low) * (step + 1) // (_PIVOTS + 1)
    return tl.where(high > low, low, tl.cast(LOWEST >> BITS, tl.int64))
