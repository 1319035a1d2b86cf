"""The draw in one pass over the logits: temperature, noise, threshold, argmax and log-probability.

A program reads one chunk of one row and leaves a few numbers; a second, tiny kernel joins the
chunks of a row. Scores of a chunk are shifted by the chunk's own maximum, since the row's is not
known yet; the winners of the chunks are then compared under the row's. Noise is generated only
where it can matter: not for greedy rows, nor in chunks that lie wholly below the threshold.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from batchgen.kernels.sampling.philox import Stream

ROW_ARGUMENTS = [
    f"{name}_ptr"
    for name in (
        "temperature", "threshold", "mode", "seeds", "positions", "draws", "greedy", "top_k",
        "top_p", "min_p", "banned", "prompt_lens", "repetition", "presence", "frequency",
    )
]  # fmt: skip
"""Kernel arguments that are [R] and may be rows of one packed tensor, at any alignment: it changes
with R, and must not make Triton compile anew in the middle of a job."""

_CHUNK = 4096
"""Fixed, as the number of warps is: a row's sums must not depend on how many rows there are."""
_PLANES = 4
_LOG_2 = tl.constexpr(0.6931471805599453)


class Draw(NamedTuple):
    """What `draw` returns for R rows.

    Attributes:
        token_ids: [R] int64, always in the vocabulary.
        logprobs: [R] float32, or None if not asked for; undefined for failed rows.
        failed: [R] bool: the row holds NaN or infinity, or excludes every token.
        confidence: [R] float32, in [0, 1]: the probability of the token under the processed
            distribution; None if not asked for, undefined for failed rows.
    """

    token_ids: Tensor
    logprobs: Tensor | None
    failed: Tensor
    confidence: Tensor | None


def draw(
    logits: Tensor,
    raw: Tensor,
    temperature: Tensor,
    threshold: Tensor | None,
    seeds: Tensor,
    positions: Tensor,
    greedy: Tensor,
    processed_logprobs: Tensor | None,
    stream: Stream = Stream.SAMPLE,
    draws: Tensor | None = None,
    confidence: bool = False,
) -> Draw:
    """One token per row: argmax(processed logits + Gumbel noise), of equal scores the lowest id.

    The processed logit is `processed_logit` of tokens at or above the threshold, else -inf.

    Args:
        logits: [R, V] bfloat16, float16 or float32, after penalties; columns contiguous.
        raw: [R, V], what the model gave: the same tensor where no penalty touched it.
        temperature: [R] float32, 1 for greedy rows.
        threshold: [R] float32 in the scale of `logits`, -inf for none; None if no row has one.
        seeds, positions: [R] int64, the key of the noise (`kernels.philox`).
        greedy: [R] bool, rows without noise.
        processed_logprobs: [R] bool, whether a row's log-probability is that of the processed
            distribution or of `raw`; None to leave log-probabilities out.
        stream: the use that the noise is for.
        draws: [R] int32 or int64, the number of the draw at its position, a part of the noise's
            key; None is 0 for all.
        confidence: whether to return it.
    """
    rows, vocab = logits.shape
    assert logits.stride(1) == 1 and raw.stride(1) == 1 and raw.shape == logits.shape
    chunks = triton.cdiv(vocab, _CHUNK)
    device = logits.device
    partials = torch.empty((_PLANES, rows, chunks), dtype=torch.float32, device=device)
    winners = torch.empty((rows, chunks), dtype=torch.int32, device=device)
    token_ids = torch.empty(rows, dtype=torch.int64, device=device)
    failed = torch.empty(rows, dtype=torch.bool, device=device)
    logprobs = probabilities = None
    if processed_logprobs is not None:
        logprobs = torch.empty(rows, dtype=torch.float32, device=device)
    if confidence:
        probabilities = torch.empty(rows, dtype=torch.float32, device=device)
    limits = temperature if threshold is None else threshold  # not read if there is none
    modes = greedy if processed_logprobs is None else processed_logprobs
    arguments = (
        logits, raw, temperature, limits, modes, seeds, positions,
        positions if draws is None else draws, greedy, partials, winners,
        logits.stride(0), raw.stride(0), vocab, rows,
    )  # fmt: skip
    flags = {
        "FILTERED": threshold is not None,
        "LOGPROBS": logprobs is not None,
        "CONFIDENCE": confidence,
        "DRAWS": draws is not None,
        "SAME": raw is logits,
        "NVIDIA": logits.is_cuda,
        "STREAM": int(stream),
    }
    _draw_chunk[(rows, chunks)](*arguments, **flags, CHUNK=_CHUNK, num_warps=8)
    results = (
        token_ids, failed, failed if logprobs is None else logprobs,
        failed if probabilities is None else probabilities,
    )  # fmt: skip
    width = triton.next_power_of_2(chunks)
    _join_chunks[(rows,)](*arguments, chunks, *results, **flags, CHUNKS=width, num_warps=1)
    return Draw(token_ids, logprobs, failed, probabilities)


@triton.jit
def processed_logit(logit, top, temperature):
    """(logit - row maximum) / temperature, as `apply_temperature`: temperature 1 changes nothing.

    The one definition that the draw, the filters and top_logprobs share.
    """
    shift = tl.where((temperature == 1) | (tl.abs(top) == float("inf")), 0.0, top)
    return tl.div_rn(logit - shift, temperature)


@triton.jit
def load_logits(ptr, columns, size):
    """Logits as float32, with NaN as +inf, so that a row's maximum tells of it, and -inf past the
    end."""
    values = tl.load(ptr + columns, mask=columns < size, other=-float("inf")).to(tl.float32)
    return tl.where(values != values, float("inf"), values)


@triton.jit
def approximate_log(values, NVIDIA: tl.constexpr):
    """With one instruction, off by 2⁻²² at most near 1; Triton's own takes twenty."""
    if NVIDIA:
        logs = tl.inline_asm_elementwise(
            "lg2.approx.ftz.f32 $0, $1;", "=f,f", [values], dtype=tl.float32, is_pure=True, pack=1
        )
    else:
        logs = tl.log2(values)
    return logs * _LOG_2


@triton.jit
def uniform(words):
    """As `kernels.philox.uniform`, to the bit."""
    return tl.minimum((words.to(tl.float32) + 0.5) * (2.0**-32), 1 - 2.0**-24)


@triton.jit
def gumbel(words, NVIDIA: tl.constexpr):
    """As `gumbel_noise`."""
    u = uniform(words)
    rest = 1 - u
    # Near 1 a logarithm is small, and the approximate one too coarse for it: a longer series there,
    # in 1 - rest (not in u: the reference takes the logarithm of the rounded rest).
    z = tl.where(u < 2.0**-10, u, 1 - rest)
    series = (((((z * (1 / 6) + 1 / 5) * z + 1 / 4) * z + 1 / 3) * z + 0.5) * z + 1) * z
    exponential = tl.where(u < 2.0**-4, series, -approximate_log(rest, NVIDIA))
    return -approximate_log(exponential, NVIDIA)


@triton.jit
def philox_words(seed, position, counters, stream, draw=0):
    """The four words of each counter, those of columns 4·counter to 4·counter + 3.

    Position is one, or one per counter; stream and draw are constants or uint32.
    """
    counters = counters.to(tl.uint32)
    zeros = tl.zeros_like(counters)
    return tl.philox(seed, counters, zeros + position.to(tl.uint32), zeros + draw, zeros + stream)


@triton.jit
def chunk_noise(
    seed, position, start, stream, CHUNK: tl.constexpr, NVIDIA: tl.constexpr, draw=0
):  # fmt: skip
    """[CHUNK]: the Gumbel noise of the columns from start on, a multiple of 4."""
    counters = start // 4 + tl.arange(0, CHUNK // 4)
    a, b, c, d = philox_words(seed, position, counters, stream, draw)
    words = tl.interleave(tl.interleave(a, c), tl.interleave(b, d))
    return gumbel(words, NVIDIA)


@triton.jit(do_not_specialize=["rows"], do_not_specialize_on_alignment=ROW_ARGUMENTS)
def _draw_chunk(
    logits_ptr, raw_ptr, temperature_ptr, threshold_ptr, mode_ptr, seeds_ptr, positions_ptr,
    draws_ptr, greedy_ptr, partials_ptr, winners_ptr, stride, raw_stride, vocab, rows,
    FILTERED: tl.constexpr, LOGPROBS: tl.constexpr, CONFIDENCE: tl.constexpr, DRAWS: tl.constexpr,
    SAME: tl.constexpr, NVIDIA: tl.constexpr, STREAM: tl.constexpr, CHUNK: tl.constexpr,
):  # fmt: skip
    """The best token of a chunk, the maxima of its logits and the sums of their exponentials."""
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
        noise = chunk_noise(seed, position, start, STREAM, CHUNK, NVIDIA, number)
        # No shift changes the order of scores, so it need not be that of the row.
        shift = tl.where((temperature == 1) | (tl.abs(top) == float("inf")), 0.0, top)
        scores = (logits - shift) * (1 / temperature) + noise
        if FILTERED:
            scores = tl.where(logits >= limit, scores, -float("inf"))
        best = tl.max(scores, axis=0)
    # No excluded token wins by a score of -inf if the temperature takes others there, too.
    winner = tl.min(tl.where((scores == best) & (logits >= limit), index, CHUNK - 1), axis=0)

    chunks = tl.num_programs(1)
    plane = rows.to(tl.int64) * chunks
    out = partials_ptr + row * chunks + chunk
    tl.store(winners_ptr + row * chunks + chunk, tl.minimum(start + winner, vocab - 1))
    tl.store(out, top)
    raw = logits
    raw_top = top
    if not SAME:
        raw = load_logits(raw_ptr + row * raw_stride, start + index, vocab)
        raw_top = tl.max(raw, axis=0)
        tl.store(out + plane, raw_top)
    if CONFIDENCE:
        tl.store(out + 3 * plane, _processed_sum(logits, top, temperature, limit))
    if LOGPROBS:
        if tl.load(mode_ptr + row) == 0:
            weights = tl.exp(raw - tl.where(raw_top == -float("inf"), 0.0, raw_top))
            tl.store(out + 2 * plane, tl.sum(weights, axis=0))
        else:
            if not CONFIDENCE:
                tl.store(out + 3 * plane, _processed_sum(logits, top, temperature, limit))


@triton.jit(do_not_specialize=["rows"], do_not_specialize_on_alignment=ROW_ARGUMENTS)
def _join_chunks(
    logits_ptr, raw_ptr, temperature_ptr, threshold_ptr, mode_ptr, seeds_ptr, positions_ptr,
    draws_ptr, greedy_ptr, partials_ptr, winners_ptr, stride, raw_stride, vocab, rows,
    chunks, tokens_ptr, failed_ptr, logprobs_ptr, confidence_ptr,
    FILTERED: tl.constexpr, LOGPROBS: tl.constexpr, CONFIDENCE: tl.constexpr, DRAWS: tl.constexpr,
    SAME: tl.constexpr, NVIDIA: tl.constexpr, STREAM: tl.constexpr, CHUNKS: tl.constexpr,
):  # fmt: skip
    """The best of the chunks' winners, whose scores are computed anew, with the row's maximum."""
    row = tl.program_id(0).to(tl.int64)
    logits_ptr += row * stride
    index = tl.arange(0, CHUNKS)
    here = index < chunks
    plane = rows.to(tl.int64) * chunks
    place = partials_ptr + row * chunks + index
    columns = tl.load(winners_ptr + row * chunks + index, mask=here, other=0)
    tops = tl.load(place, mask=here, other=-float("inf"))
    top = tl.max(tops, axis=0)
    logits = tl.load(logits_ptr + columns, mask=here, other=-float("inf")).to(tl.float32)
    if FILTERED:
        logits = tl.where(logits >= tl.load(threshold_ptr + row), logits, -float("inf"))
    temperature = tl.load(temperature_ptr + row)
    scores = processed_logit(logits, top, temperature)
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
    token = tl.min(tl.where(scores == tl.max(scores, axis=0), columns, vocab - 1), axis=0)
    tl.store(tokens_ptr + row, token.to(tl.int64))

    raw_tops = tops
    raw_top = top
    if not SAME:
        raw_tops = tl.load(place + plane, mask=here, other=-float("inf"))
        raw_top = tl.max(raw_tops, axis=0)
    tl.store(failed_ptr + row, tl.abs(raw_top) == float("inf"))
    if CONFIDENCE:
        value = (tl.load(logits_ptr + token).to(tl.float32) - top) / temperature
        sums = tl.load(place + 3 * plane, mask=here, other=0.0)
        # The maximum is a term of the total, which so is at least 1: no probability is above 1.
        total = _processed_total(sums, tops, top, temperature)
        tl.store(confidence_ptr + row, tl.div_rn(tl.exp(value), total))
    if LOGPROBS:
        if tl.load(mode_ptr + row) == 0:
            value = tl.load(raw_ptr + row * raw_stride + token).to(tl.float32) - raw_top
            sums = tl.load(place + 2 * plane, mask=here, other=0.0)
            total = tl.sum(sums * tl.exp(raw_tops - raw_top), axis=0)
        else:
            value = (tl.load(logits_ptr + token).to(tl.float32) - top) / temperature
            sums = tl.load(place + 3 * plane, mask=here, other=0.0)
            total = _processed_total(sums, tops, top, temperature)
        tl.store(logprobs_ptr + row, value - tl.log(total))


@triton.jit
def _processed_sum(logits, top, temperature, limit):
    """Of the exponentials of a chunk's processed logits, below the chunk's maximum."""
    weights = tl.exp((logits - tl.where(top == -float("inf"), 0.0, top)) / temperature)
    return tl.sum(tl.where((logits >= limit) & (logits > -float("inf")), weights, 0.0), axis=0)


@triton.jit
def _processed_total(sums, tops, top, temperature):
    """The sums of the chunks, each below its own maximum, as one below the row's."""
    sums = tl.where(tops > -float("inf"), sums * tl.exp((tops - top) / temperature), 0.0)
    return tl.sum(sums, axis=0)
