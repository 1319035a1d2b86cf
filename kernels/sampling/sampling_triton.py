"""The draw in one pass over the logits: temperature, noise, threshold, argmax and log-probability,
in Triton. The engine's sampler calls `draw_triton`.

A program of the first kernel reads one chunk of one row, and writes the chunk's best token and a
few sums. A second, tiny kernel joins a row's chunks. A chunk's scores are shifted by its own
maximum, so the second kernel computes the best tokens' scores again with the row's maximum. Noise
is computed only where it can matter: not in greedy rows, nor in chunks wholly below the threshold.

With vocabulary-parallel logits each rank runs the first kernel on its own columns, the ranks gather
the results, and all of them join all chunks.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from batchgen.kernels.sampling.noise_triton import chunk_noise, gumbel, philox_words
from batchgen.kernels.sampling.philox import Stream

ROW_ARGUMENTS = [
    f"{name}_ptr"
    for name in (
        "temperature", "threshold", "mode", "seeds", "positions", "draws", "greedy", "top_k",
        "top_p", "min_p", "banned", "prompt_lens", "repetition", "presence", "frequency", "given",
    )
]  # fmt: skip
"""Kernel arguments that point to [R] values. They may be rows of one packed tensor, so their
alignment varies with R. Kernels do not specialise on it, or Triton would compile them again in the
middle of a job."""

CHUNK = 4096
"""Columns of a chunk. It is fixed, as the number of warps is, so that a row's sums do not depend on
the number of rows."""
_PLANES = tl.constexpr(6)
"""Numbers that the first kernel writes per chunk: the maxima of the logits and of the raw logits;
the sums of the exponentials of the raw logits and of the processed ones; and the logit and the
column (as bits) of the best token."""


def can_divide(vocab: int, columns: int, ranks: int) -> bool:
    """Return whether `ranks` ranks with `columns` columns each draw the same tokens, to the bit, as
    one rank with all columns: chunks must be whole, and joined in the same order."""
    whole, divided = triton.cdiv(vocab, CHUNK), ranks * triton.cdiv(columns, CHUNK)
    same_order = triton.next_power_of_2(whole) == triton.next_power_of_2(divided)
    return columns % CHUNK == 0 and same_order


class Share(NamedTuple):
    """The consecutive columns of the logits that this rank has. Other ranks have as many each, in
    the order of the ranks (`can_divide`)."""

    first: int  # the number of the first one
    vocab: int  # the columns of all ranks; this one's last ones may be past them
    ranks: int
    gather: Callable[[Tensor], Tensor]  # from [R, C] of each rank to [R, ranks · C]


class Draw(NamedTuple):
    """The drawn token of each of R rows. For failed rows only `token_ids` and `failed` are
    defined."""

    token_ids: Tensor  # [R] int64, always ids of the vocabulary
    logprobs: Tensor | None  # [R] float32, of the token; None without `processed_logprobs`
    failed: Tensor  # [R] bool: the raw logits hold NaN or +inf, or are all -inf
    confidence: Tensor | None  # [R] float32, the token's processed probability; None without it


def draw_triton(
    logits: Tensor,  # [R, V] after penalties; the last axis is contiguous
    raw: Tensor,  # [R, V], the model's; the tensor `logits` if no penalty changed it
    temperature: Tensor,  # [R] float32
    threshold: Tensor | None,  # [R] float32 in the scale of `logits`, or -inf
    seeds: Tensor,  # [R] int64
    positions: Tensor,  # [R] int64, of the tokens to draw
    greedy: Tensor,  # [R] bool
    processed_logprobs: Tensor | None,  # [R] bool
    stream: Stream = Stream.SAMPLE,
    draws: Tensor | None = None,  # [R]: earlier draws of the position; None: 0
    confidence: bool = False,
    scored_ids: Tensor | None = None,  # [R] int64: take these tokens instead of drawing any
    share: Share | None = None,  # of the columns, which the logits are; None: they have all
) -> Draw:
    """Draw one token per row: argmax(processed logits + Gumbel noise), of equal scores the first.

    A token's processed logit is `processed_logit` if its logit is at or above the threshold, else
    -inf. The processed distribution is the softmax of these. Greedy rows have temperature 1 and no
    noise. `processed_logprobs` [R] selects each row's log-probability: of the processed
    distribution or of softmax(raw); None computes none.

    With a `share` all ranks call this with equal options. Then `raw` must be `logits`, and
    threshold, confidence and scored_ids are not supported.
    """
    rows, vocab = logits.shape
    assert logits.stride(1) == 1 and raw.stride(1) == 1 and raw.shape == logits.shape
    chunks, first, ranks = triton.cdiv(vocab, CHUNK), 0, 1
    device = logits.device
    if share is not None:
        assert raw is logits and threshold is None and scored_ids is None and not confidence
        assert can_divide(share.vocab, vocab, share.ranks)
        first, ranks = share.first, share.ranks
        vocab = min(vocab, share.vocab - first)
    partials = torch.empty((rows, _PLANES.value * chunks), dtype=torch.float32, device=device)
    token_ids = torch.empty(rows, dtype=torch.int64, device=device)
    failed = torch.empty(rows, dtype=torch.bool, device=device)
    logprobs = probabilities = None
    if processed_logprobs is not None:
        logprobs = torch.empty(rows, dtype=torch.float32, device=device)
    if confidence:
        probabilities = torch.empty(rows, dtype=torch.float32, device=device)
    # A pointer must be given even where the kernel does not read it.
    limits = temperature if threshold is None else threshold
    modes = greedy if processed_logprobs is None else processed_logprobs
    if scored_ids is not None:
        greedy = torch.ones_like(greedy)  # no noise
    arguments = (
        logits, raw, temperature, limits, modes, seeds, positions,
        positions if draws is None else draws, greedy,
    )  # fmt: skip
    assert all(each.is_contiguous() for each in arguments[2:])  # kernels read them by the row
    strides = (logits.stride(0), raw.stride(0))
    flags = {
        "FILTERED": threshold is not None,
        "LOGPROBS": logprobs is not None,
        "CONFIDENCE": confidence,
        "DRAWS": draws is not None,
        "GIVEN": scored_ids is not None,
        "SAME": raw is logits,
        "NVIDIA": logits.is_cuda,  # logarithms are one instruction (`approximate_log`)
        "STREAM": int(stream),
    }
    _draw_chunk[(rows, chunks)](
        *arguments, partials, *strides, vocab, first, **flags, CHUNK=CHUNK, num_warps=8
    )
    if share is not None:
        partials = share.gather(partials)
    results = (
        token_ids, failed, failed if logprobs is None else logprobs,
        failed if probabilities is None else probabilities,
        token_ids if scored_ids is None else scored_ids,
    )  # fmt: skip
    _join_chunks[(rows,)](
        *arguments, partials, *strides, vocab if share is None else share.vocab, chunks, ranks,
        *results, **flags, CHUNKS=triton.next_power_of_2(ranks * chunks), num_warps=1,
    )  # fmt: skip
    return Draw(token_ids, logprobs, failed, probabilities)


@triton.jit
def processed_logit(logit, top, temperature):
    """Return (logit - row maximum) / temperature, as `apply_temperature` does. Draw, filters and
    `top_logprobs` all call this function, so their values agree to the bit."""
    shift = tl.where((temperature == 1) | (tl.abs(top) == float("inf")), 0.0, top)
    return tl.div_rn(logit - shift, temperature)


@triton.jit
def load_logits(ptr, columns, size):
    """Load logits as float32: NaN as +inf, so that the maximum reveals it, and -inf from `size`
    on."""
    values = tl.load(ptr + columns, mask=columns < size, other=-float("inf")).to(tl.float32)
    return tl.where(values != values, float("inf"), values)


@triton.jit(do_not_specialize=["first"], do_not_specialize_on_alignment=ROW_ARGUMENTS)
def _draw_chunk(
    logits_ptr, raw_ptr, temperature_ptr, threshold_ptr, mode_ptr, seeds_ptr, positions_ptr,
    draws_ptr, greedy_ptr, found_ptr, stride, raw_stride, vocab, first,
    FILTERED: tl.constexpr, LOGPROBS: tl.constexpr, CONFIDENCE: tl.constexpr, DRAWS: tl.constexpr,
    GIVEN: tl.constexpr, SAME: tl.constexpr, NVIDIA: tl.constexpr, STREAM: tl.constexpr,
    CHUNK: tl.constexpr,
):  # fmt: skip
    """Each program writes the best token of one chunk and the numbers of `_PLANES`."""
    row = tl.program_id(0).to(tl.int64)
    chunk = tl.program_id(1)
    start = chunk * CHUNK
    index = tl.arange(0, CHUNK)
    logits = load_logits(logits_ptr + row * stride, start + index, vocab)
    top = tl.max(logits, axis=0)
    temperature = tl.load(temperature_ptr + row)
    limit = -float("inf")
    if FILTERED:
        limit = tl.load(threshold_ptr + row)

    scores = logits
    best = top
    if (tl.load(greedy_ptr + row) == 0) & (top >= limit) & (top > -float("inf")):
        seed = tl.load(seeds_ptr + row)
        position = tl.load(positions_ptr + row)
        number = 0
        if DRAWS:
            number = tl.load(draws_ptr + row).to(tl.uint32)
        noise = chunk_noise(seed, position, first + start, STREAM, CHUNK, NVIDIA, number)
        # A shift does not change the order of scores, so it need not be the row's maximum.
        shift = tl.where((temperature == 1) | (tl.abs(top) == float("inf")), 0.0, top)
        scores = (logits - shift) * (1 / temperature) + noise
        if FILTERED:
            scores = tl.where(logits >= limit, scores, -float("inf"))
        best = tl.max(scores, axis=0)
    # A low temperature can take the scores of kept tokens to -inf, which excluded tokens have too.
    # The second condition lets no excluded token win then.
    winner = tl.min(tl.where((scores == best) & (logits >= limit), index, CHUNK - 1), axis=0)

    chunks = tl.num_programs(1)
    out = found_ptr + row * (_PLANES * chunks) + chunk
    tl.store(out, top)
    logit = tl.max(tl.where(index == winner, logits, -float("inf")), axis=0)
    tl.store(out + 4 * chunks, logit)
    column = first + tl.minimum(start + winner, vocab - 1)
    tl.store(out + 5 * chunks, column.to(tl.int32).to(tl.float32, bitcast=True))
    raw = logits
    raw_top = top
    if not SAME:
        raw = load_logits(raw_ptr + row * raw_stride, start + index, vocab)
        raw_top = tl.max(raw, axis=0)
        tl.store(out + chunks, raw_top)
    if CONFIDENCE:
        tl.store(out + 3 * chunks, _processed_sum(logits, top, temperature, limit))
    if LOGPROBS:
        if tl.load(mode_ptr + row) == 0:
            weights = tl.exp(raw - tl.where(raw_top == -float("inf"), 0.0, raw_top))
            tl.store(out + 2 * chunks, tl.sum(weights, axis=0))
        else:
            if not CONFIDENCE:
                tl.store(out + 3 * chunks, _processed_sum(logits, top, temperature, limit))


@triton.jit(do_not_specialize_on_alignment=ROW_ARGUMENTS)
def _join_chunks(
    logits_ptr, raw_ptr, temperature_ptr, threshold_ptr, mode_ptr, seeds_ptr, positions_ptr,
    draws_ptr, greedy_ptr, found_ptr, stride, raw_stride, vocab, chunks, ranks,
    tokens_ptr, failed_ptr, logprobs_ptr, confidence_ptr, given_ptr,
    FILTERED: tl.constexpr, LOGPROBS: tl.constexpr, CONFIDENCE: tl.constexpr, DRAWS: tl.constexpr,
    GIVEN: tl.constexpr, SAME: tl.constexpr, NVIDIA: tl.constexpr, STREAM: tl.constexpr,
    CHUNKS: tl.constexpr,
):  # fmt: skip
    """Each program joins the chunks of one row, and scores their best tokens with the row's
    maximum."""
    row = tl.program_id(0).to(tl.int64)
    logits_ptr += row * stride
    index = tl.arange(0, CHUNKS)
    here = index < ranks * chunks
    found_ptr += row * (ranks * _PLANES * chunks)
    source = found_ptr + index // chunks * (_PLANES * chunks) + index % chunks
    tops = tl.load(source, mask=here, other=-float("inf"))
    top = tl.max(tops, axis=0)
    best = tl.load(source + 4 * chunks, mask=here, other=-float("inf"))
    columns = tl.load(source + 5 * chunks, mask=here, other=0.0).to(tl.int32, bitcast=True)
    kept = best
    if FILTERED:
        kept = tl.where(best >= tl.load(threshold_ptr + row), best, -float("inf"))
    temperature = tl.load(temperature_ptr + row)
    scores = processed_logit(kept, top, temperature)
    if tl.load(greedy_ptr + row) == 0:
        seed = tl.load(seeds_ptr + row)
        position = tl.load(positions_ptr + row)
        number = 0
        if DRAWS:
            number = tl.load(draws_ptr + row).to(tl.uint32)
        a, b, c, d = philox_words(seed, position, columns // 4, STREAM, number)
        lane = columns % 4
        words = tl.where(lane < 2, tl.where(lane == 0, a, b), tl.where(lane == 2, c, d))
        scores += gumbel(words, NVIDIA)
    if GIVEN:
        token = tl.load(given_ptr + row)
        logit = tl.load(logits_ptr + token).to(tl.float32)
    else:
        token = tl.min(tl.where(scores == tl.max(scores, axis=0), columns, vocab - 1), axis=0)
        logit = tl.max(tl.where(columns == token, best, -float("inf")), axis=0)
    tl.store(tokens_ptr + row, token.to(tl.int64))

    raw_tops = tops
    raw_top = top
    if not SAME:
        raw_tops = tl.load(source + chunks, mask=here, other=-float("inf"))
        raw_top = tl.max(raw_tops, axis=0)
    tl.store(failed_ptr + row, tl.abs(raw_top) == float("inf"))
    if CONFIDENCE:
        value = (logit - top) / temperature
        sums = tl.load(source + 3 * chunks, mask=here, other=0.0)
        # The most likely token adds 1 to the total, so no probability is above 1.
        total = _processed_total(sums, tops, top, temperature)
        tl.store(confidence_ptr + row, tl.div_rn(tl.exp(value), total))
    if LOGPROBS:
        if tl.load(mode_ptr + row) == 0:
            raw = logit
            if not SAME:
                raw = tl.load(raw_ptr + row * raw_stride + token).to(tl.float32)
            value = raw - raw_top
            sums = tl.load(source + 2 * chunks, mask=here, other=0.0)
            total = tl.sum(sums * tl.exp(raw_tops - raw_top), axis=0)
        else:
            value = (logit - top) / temperature
            if GIVEN and FILTERED:  # a drawn token is never below the threshold
                value = tl.where(logit >= tl.load(threshold_ptr + row), value, -float("inf"))
            sums = tl.load(source + 3 * chunks, mask=here, other=0.0)
            total = _processed_total(sums, tops, top, temperature)
        tl.store(logprobs_ptr + row, value - tl.log(total))


@triton.jit
def _processed_sum(logits, top, temperature, limit):
    """Sum the exponentials of a chunk's processed logits, shifted by the chunk's maximum `top`."""
    weights = tl.exp((logits - tl.where(top == -float("inf"), 0.0, top)) / temperature)
    return tl.sum(tl.where((logits >= limit) & (logits > -float("inf")), weights, 0.0), axis=0)


@triton.jit
def _processed_total(sums, tops, top, temperature):
    """Add up the sums of a row's chunks, shifted from the chunks' maxima to the row's maximum."""
    sums = tl.where(tops > -float("inf"), sums * tl.exp((tops - top) / temperature), 0.0)
    return tl.sum(sums, axis=0)
