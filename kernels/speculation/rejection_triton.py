"""Speculative sampling by rejection in Triton, in three launches. `rejection.py` calls it and
defines p, the target model's distribution, and q, that of the drafts.

The vocabulary is cut into chunks of a fixed size, so that a row's bits do not depend on its batch.
The first launch reduces each chunk of each row of logits that is needed. The second launch has a
program for each row of the batch and each chunk. A program joins the results of all chunks to find
the first rejected draft of its row; that every program repeats this is cheaper than a launch of its
own. It then draws a candidate from its own chunk of the logits at that draft. The third launch
takes the best candidate of each row.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from batchgen.kernels.sampling.noise_triton import (
    approximate_log,
    chunk_noise,
    philox_words,
    uniform_triton,
)
from batchgen.kernels.sampling.philox import Stream
from batchgen.kernels.sampling.sampling_triton import ROW_ARGUMENTS, draw_triton, load_logits

_ROW_ARGUMENTS = [*ROW_ARGUMENTS, "num_drafts_ptr", "drafts_ptr", "sums_ptr"]
"""Pointers whose alignment Triton must not specialise on, or it would compile kernels again. The
sums are the second half of a tensor that `verify_triton` allocates, so their alignment changes with
the batch."""
_CHUNK = 4096
"""Columns of the vocabulary per chunk."""
_SAMPLE = tl.constexpr(int(Stream.SAMPLE))
_ACCEPT = tl.constexpr(int(Stream.ACCEPT))
_RECOVER = tl.constexpr(int(Stream.RECOVER))


def verify_triton(
    logits: Tensor,  # [B · (k + 1), V]
    drafts: Tensor,  # [B, k]
    num_drafts: Tensor,  # [B]
    draft_probs: Tensor | None,  # [B, k, V], q; None: all on the draft
    seeds: Tensor,  # [B] int64
    positions: Tensor,  # [B] int64, of each row's first draft
    greedy: Tensor,  # [B] bool
) -> tuple[Tensor, Tensor, Tensor]:
    """Compute the three fields of `rejection.Verified` on CUDA: num_tokens [B] int32, the accepted
    drafts plus one, 0 for a failed row; token_ids [B, k + 1] int64, any from num_tokens on; and
    failed [B] bool.

    Of q only the probabilities of the drafts are read, and the whole distribution at a rejected
    draft.
    """
    batch, k = drafts.shape
    width, vocab = k + 1, logits.shape[1]
    assert len(logits) == batch * width and logits.stride(1) == 1
    assert k == 0 or drafts.stride(1) == 1
    assert draft_probs is None or draft_probs.is_contiguous()
    chunks, device = triton.cdiv(vocab, _CHUNK), logits.device
    # Of each chunk: its maximum, its sum of exponentials, the column of its maximum; then the
    # scores and the columns of its two candidates, by (p - q)+ and by p.
    tops, sums = torch.empty((2, batch * width, chunks), dtype=torch.float32, device=device)
    highest = torch.empty((batch * width, chunks), dtype=torch.int32, device=device)
    scores = torch.empty((2, batch, chunks), dtype=torch.float32, device=device)
    winners = torch.empty((2, batch, chunks), dtype=torch.int32, device=device)
    num_tokens = torch.empty(batch, dtype=torch.int32, device=device)
    token_ids = torch.empty((batch, width), dtype=torch.int64, device=device)
    failed = torch.empty(batch, dtype=torch.bool, device=device)
    _reduce_chunk[(batch * width, chunks)](
        logits, num_drafts, tops, sums, highest, logits.stride(0), vocab, width,
        CHUNK=_CHUNK, num_warps=8,
    )  # fmt: skip
    _draw_chunk[(batch, chunks)](
        logits, drafts, num_drafts, logits if draft_probs is None else draft_probs,
        seeds, positions, greedy, tops, sums, highest, scores, winners,
        num_tokens, token_ids, failed, logits.stride(0), drafts.stride(0), vocab, width, batch,
        # NVIDIA: logarithms are one instruction of the GPU (`approximate_log`).
        PROBS=draft_probs is not None, NVIDIA=logits.is_cuda, CHUNK=_CHUNK,
        WIDTH=triton.next_power_of_2(width), CHUNKS=triton.next_power_of_2(chunks), num_warps=8,
    )  # fmt: skip
    _join_chunks[(batch,)](
        greedy, scores, winners, num_tokens, token_ids, vocab, width, batch, chunks,
        CHUNKS=triton.next_power_of_2(chunks), num_warps=1,
    )  # fmt: skip
    return num_tokens, token_ids, failed


def draw_drafts_triton(
    logits: Tensor, seeds: Tensor, positions: Tensor, greedy: Tensor
) -> tuple[Tensor, Tensor]:
    """Compute `rejection.draw_drafts` on CUDA, from logits [B, V]: the ordinary draw of the drafts
    [B] int64, then a launch that writes q [B, V] float32."""
    rows, vocab = logits.shape
    drawn = draw_triton(
        logits,
        raw=logits,
        temperature=torch.ones_like(seeds, dtype=torch.float32),
        threshold=None,
        seeds=seeds,
        positions=positions,
        greedy=greedy,
        # A boolean per row whose value does not matter: at temperature 1 the log-probabilities of
        # both distributions are equal.
        processed_logprobs=greedy,
        stream=Stream.DRAFT,
    )
    probs = torch.empty((rows, vocab), dtype=torch.float32, device=logits.device)
    _write_probs[(rows, triton.cdiv(vocab, _CHUNK))](
        logits, drawn.token_ids, drawn.logprobs, drawn.failed, greedy, probs,
        logits.stride(0), vocab, CHUNK=_CHUNK, num_warps=8,
    )  # fmt: skip
    return drawn.token_ids, probs


@triton.jit(do_not_specialize=["width"], do_not_specialize_on_alignment=_ROW_ARGUMENTS)
def _reduce_chunk(
    logits_ptr, num_drafts_ptr, tops_ptr, sums_ptr, highest_ptr, stride, vocab, width,
    CHUNK: tl.constexpr,
):  # fmt: skip
    """Reduce a chunk of a row to its maximum, the first column that has it, and Σ exp(logit -
    max)."""
    logits_row = tl.program_id(0).to(tl.int64)
    if logits_row % width <= tl.load(num_drafts_ptr + logits_row // width):
        chunk = tl.program_id(1)
        columns = chunk * CHUNK + tl.arange(0, CHUNK)
        logits = load_logits(logits_ptr + logits_row * stride, columns, vocab)
        top = tl.max(logits, axis=0)
        shift = tl.where(tl.abs(top) == float("inf"), 0.0, top)
        out = logits_row * tl.num_programs(1) + chunk
        tl.store(tops_ptr + out, top)
        tl.store(sums_ptr + out, tl.sum(tl.exp(logits - shift), axis=0))
        column = tl.min(tl.where(logits == top, columns, vocab - 1), axis=0)
        tl.store(highest_ptr + out, column)


@triton.jit
def _accept(
    logits_ptr, drafts_ptr, probs_ptr, seed, position, greedy, tops_ptr, sums_ptr, highest_ptr,
    stride, vocab, width, count, row, chunks,
    PROBS: tl.constexpr, WIDTH: tl.constexpr, CHUNKS: tl.constexpr,
):  # fmt: skip
    """Return the number of drafts that a row accepts, and for each step [WIDTH] the draft, the
    column of the highest logit, that logit, and Σ exp(logit - highest)."""
    step = tl.arange(0, WIDTH)
    chunk = tl.arange(0, CHUNKS)
    logits_rows = row * width + step
    here = (step[:, None] <= count) & (chunk[None, :] < chunks)
    index = logits_rows[:, None] * chunks + chunk[None, :]
    chunk_tops = tl.load(tops_ptr + index, mask=here, other=-float("inf"))
    chunk_sums = tl.load(sums_ptr + index, mask=here, other=0.0)
    columns = tl.load(highest_ptr + index, mask=here, other=0)
    top = tl.max(chunk_tops, axis=1)
    finite = tl.abs(top) < float("inf")
    shift = tl.where(finite, top, 0.0)
    total = tl.sum(chunk_sums * tl.exp(chunk_tops - shift[:, None]), axis=1)
    total = tl.where(finite, total, 1.0)
    highest = tl.min(tl.where(chunk_tops == top[:, None], columns, vocab - 1), axis=1)

    drafted = step < count
    drafts = tl.load(drafts_ptr + step, mask=drafted, other=0)
    logit = tl.load(logits_ptr + logits_rows * stride + drafts, mask=drafted, other=-float("inf"))
    p = tl.exp(logit - shift) / total
    words = philox_words(seed, position + step, tl.zeros_like(step), _ACCEPT)
    threshold = uniform_triton(words[0])
    if PROBS:
        q_row = row * (width - 1) + step
        threshold *= tl.load(probs_ptr + q_row * vocab + drafts, mask=drafted, other=0.0)
    accepts = tl.where(greedy, drafts == highest, threshold < p)
    # The step after the last draft never accepts, so the minimum is at most that step.
    stop = tl.min(tl.where(drafted & finite & accepts, WIDTH, step), axis=0)
    return stop, drafts, highest, top, total


@triton.jit(do_not_specialize=["width", "batch"], do_not_specialize_on_alignment=_ROW_ARGUMENTS)
def _draw_chunk(
    logits_ptr, drafts_ptr, num_drafts_ptr, probs_ptr, seeds_ptr, positions_ptr, greedy_ptr,
    tops_ptr, sums_ptr, highest_ptr, scores_ptr, winners_ptr, num_tokens_ptr, token_ids_ptr,
    failed_ptr, stride, drafts_stride, vocab, width, batch,
    PROBS: tl.constexpr, NVIDIA: tl.constexpr, CHUNK: tl.constexpr, WIDTH: tl.constexpr,
    CHUNKS: tl.constexpr,
):  # fmt: skip
    """Find where a row stops, and draw from one chunk there: the best token by (p - q)+ and the
    best by p, with the same Gumbel noise.

    The score by (p - q)+ is -inf if (p - q)+ is zero in the whole chunk or all drafts were
    accepted. The program of chunk 0 also writes the accepted drafts, a greedy row's token,
    num_tokens and failed.
    """
    row = tl.program_id(0).to(tl.int64)
    chunk = tl.program_id(1)
    chunks = tl.num_programs(1)
    count = tl.load(num_drafts_ptr + row)
    seed = tl.load(seeds_ptr + row)
    position = tl.load(positions_ptr + row)
    greedy = tl.load(greedy_ptr + row) != 0
    stop, drafts, highest, tops, totals = _accept(
        logits_ptr, drafts_ptr + row * drafts_stride, probs_ptr, seed, position, greedy,
        tops_ptr, sums_ptr, highest_ptr, stride, vocab, width, count, row, chunks,
        PROBS, WIDTH, CHUNKS,
    )  # fmt: skip
    step = tl.arange(0, WIDTH)
    top = tl.sum(tl.where(step == stop, tops, 0.0), axis=0)
    failed = tl.abs(top) == float("inf")
    if chunk == 0:
        token = tl.sum(tl.where(step == stop, highest, 0), axis=0).to(tl.int64)
        tokens = tl.where(step < stop, drafts, token)
        tl.store(token_ids_ptr + row * width + step, tokens, mask=step < width)
        tl.store(num_tokens_ptr + row, tl.where(failed, 0, stop + 1))
        tl.store(failed_ptr + row, failed)

    columns = chunk * CHUNK + tl.arange(0, CHUNK)
    best = tl.full((), -float("inf"), tl.float32)
    best_plain = best
    winner = tl.full((), 0, tl.int32)
    winner_plain = winner
    logits_row = row * width + stop
    any_allowed = tl.load(tops_ptr + logits_row * chunks + chunk) > -float("inf")
    if any_allowed & (greedy == 0) & (failed == 0):
        rejected = stop < count
        logits = load_logits(logits_ptr + logits_row * stride, columns, vocab)
        stream = tl.where(rejected, _RECOVER, _SAMPLE).to(tl.uint32)
        noise = chunk_noise(seed, position + stop, chunk * CHUNK, stream, CHUNK, NVIDIA)
        plain = logits + noise
        if PROBS:
            q_ptr = probs_ptr + (row * (width - 1) + stop) * vocab
            limit = tl.where(rejected, vocab, 0)
            q = tl.load(q_ptr + columns, mask=columns < limit, other=float("inf"))
            total = tl.sum(tl.where(step == stop, totals, 0.0), axis=0)
            weights = tl.exp(logits - top) / total - q
            some = weights > 0
            logs = approximate_log(tl.where(some, weights, 1.0), NVIDIA)
            scores = tl.where(some, logs + noise, -float("inf"))
        else:
            draft = tl.sum(tl.where(step == stop, drafts, 0), axis=0)
            scores = tl.where(rejected & (columns != draft), plain, -float("inf"))
        best = tl.max(scores, axis=0)
        winner = tl.min(tl.where(scores == best, columns, vocab - 1), axis=0)
        best_plain = tl.max(plain, axis=0)
        winner_plain = tl.min(tl.where(plain == best_plain, columns, vocab - 1), axis=0)
    out = row * chunks + chunk
    plane = batch.to(tl.int64) * chunks
    tl.store(scores_ptr + out, best)
    tl.store(scores_ptr + plane + out, best_plain)
    tl.store(winners_ptr + out, winner)
    tl.store(winners_ptr + plane + out, winner_plain)


@triton.jit(do_not_specialize=["width", "batch"], do_not_specialize_on_alignment=_ROW_ARGUMENTS)
def _join_chunks(
    greedy_ptr, scores_ptr, winners_ptr, num_tokens_ptr, token_ids_ptr, vocab, width, batch,
    chunks, CHUNKS: tl.constexpr,
):  # fmt: skip
    """Write the last token of a row that is not greedy: the best candidate by (p - q)+, or else by
    p."""
    row = tl.program_id(0).to(tl.int64)
    count = tl.load(num_tokens_ptr + row)
    if (tl.load(greedy_ptr + row) == 0) & (count > 0):
        index = tl.arange(0, CHUNKS)
        here = index < chunks
        plane = batch.to(tl.int64) * chunks
        out = row * chunks + index
        scores = tl.load(scores_ptr + out, mask=here, other=-float("inf"))
        columns = tl.load(winners_ptr + out, mask=here, other=0)
        if tl.max(scores, axis=0) == -float("inf"):
            scores = tl.load(scores_ptr + plane + out, mask=here, other=-float("inf"))
            columns = tl.load(winners_ptr + plane + out, mask=here, other=0)
        token = tl.min(tl.where(scores == tl.max(scores, axis=0), columns, vocab - 1), axis=0)
        tl.store(token_ids_ptr + row * width + count - 1, token.to(tl.int64))


@triton.jit(do_not_specialize_on_alignment=_ROW_ARGUMENTS)
def _write_probs(
    logits_ptr, token_ids_ptr, logprobs_ptr, failed_ptr, greedy_ptr, probs_ptr, stride, vocab,
    CHUNK: tl.constexpr,
):  # fmt: skip
    """Write one chunk of q, from the drawn token's probability and the differences between the
    logits and its logit. For greedy and failed rows q is 1 at that token and 0 elsewhere."""
    row = tl.program_id(0).to(tl.int64)
    columns = tl.program_id(1) * CHUNK + tl.arange(0, CHUNK)
    token = tl.load(token_ids_ptr + row)
    if (tl.load(greedy_ptr + row) != 0) | (tl.load(failed_ptr + row) != 0):
        probs = tl.where(columns == token, 1.0, 0.0)
    else:
        logits = load_logits(logits_ptr + row * stride, columns, vocab)
        base = tl.load(logits_ptr + row * stride + token).to(tl.float32)
        probs = tl.exp(logits - base + tl.load(logprobs_ptr + row))
    tl.store(probs_ptr + row * vocab + columns, probs, mask=columns < vocab)
