"""From logits to a token: penalties, ban, temperature, filters, the draw and its log-probabilities.

A row's bits do not depend on other rows. That rules out `sum` and `logsumexp` over the vocabulary,
whose order on a CPU depends on the number of rows; `softmax`, `log_softmax` and `cumsum` add in one
order. Functions named `apply_…` and `filter_…` overwrite and return their logits, [R, V] float32
and contiguous. A logit is finite, or -inf if the token is excluded.

For CUDA tensors the functions run the Triton kernels in this folder. The engine's sampler calls
fused kernels that do several of these steps at once.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from batchgen.kernels.sampling import (
    entropy_triton,
    filter_triton,
    penalties_triton,
    sampling_triton,
    top_logprobs_triton,
)
from batchgen.kernels.sampling.philox import Stream, gumbel_noise, philox, philox_at

_INF = float("inf")
_LARGEST = torch.finfo(torch.float32).max
_WORDS_IN_CACHE = 2**18
"""Random words that a CPU computes at a time: few enough that Philox's state stays in the L2 caches
of two cores."""
_ROWS_IN_CACHE = 16
"""Rows whose entropies a CPU computes at a time."""


def sample(
    logits: Tensor,  # [R, V] float32, after temperature and filters
    seeds: Tensor,
    positions: Tensor,  # [R] int64, of the token that is drawn
    greedy: Tensor,
    stream: Stream = Stream.SAMPLE,
    draws: Tensor | None = None,  # [R]: earlier draws of the position; None: 0
) -> Tensor:
    """Draw one token per row, [R] int64, from softmax(logits), as argmax(logits + Gumbel noise).

    Greedy rows get no noise. Of equal scores the lowest id wins. A row in which every token is
    excluded yields 0.
    """
    if logits.is_cuda:
        draw = sampling_triton.draw_triton(
            logits,
            raw=logits,
            temperature=torch.ones_like(seeds, dtype=torch.float32),
            threshold=None,
            seeds=seeds,
            positions=positions,
            greedy=greedy,
            processed_logprobs=None,
            stream=stream,
            draws=draws,
        )
        return draw.token_ids
    if draws is None:
        draws = torch.zeros_like(seeds)
    out = torch.empty(len(logits), dtype=torch.int64)
    rows = greedy.nonzero().squeeze(1)
    if len(rows):
        out[rows] = logits[rows].argmax(-1)
    # A token's noise does not depend on other tokens, so rows with few remaining tokens compute the
    # noise of those only.
    counts = (logits > -_INF).sum(-1)
    sparse = counts * 16 <= logits.shape[1]
    dense = (~greedy & ~sparse).nonzero().squeeze(1)
    step = max(1, _WORDS_IN_CACHE // logits.shape[1])
    for start in range(0, len(dense), step):
        rows = dense[start : start + step]
        words = philox(seeds[rows], positions[rows], draws[rows], stream, logits.shape[1])
        out[rows] = gumbel_noise(words).add_(logits[rows]).argmax(-1)
    rows = (~greedy & sparse).nonzero().squeeze(1)
    if len(rows):
        sparse_logits = logits[rows]
        # Filler entries are column 0: it is excluded, or among the columns anyway.
        columns, _ = _columns_of(sparse_logits > -_INF)
        words = philox_at(seeds[rows], positions[rows], draws[rows], stream, columns)
        scores = gumbel_noise(words).add_(sparse_logits.gather(1, columns))
        out[rows] = columns.gather(1, scores.argmax(-1, keepdim=True)).squeeze(1)
    return out


def _columns_of(keep: Tensor) -> tuple[Tensor, Tensor]:
    """List the columns where `keep` [R, V] is true, on a CPU: [R, S] columns, and [R, S] bool that
    is false for filler."""
    rows, columns = keep.nonzero(as_tuple=True)
    counts = torch.bincount(rows, minlength=len(keep))
    width = max(1, int(counts.max()))
    index = torch.arange(len(rows)) - (counts.cumsum(0) - counts)[rows]
    out = torch.zeros(len(keep), width, dtype=torch.int64)
    out[rows, index] = columns
    return out, torch.arange(width) < counts.unsqueeze(1)


def apply_penalties(
    logits: Tensor,  # [R, V] float32; overwritten for tokens in the histories
    source: Tensor,  # [R, V], another tensor: the logits before the penalties
    history: Tensor,  # [B, H] int64, token ids by absolute position; negative: ignored
    positions: Tensor,  # [R] int64; tokens from here on do not count
    prompt_lens: Tensor,  # [R] int64: where the output begins
    repetition: Tensor,  # [R] float32
    presence: Tensor,  # [R] float32
    frequency: Tensor,  # [R] float32
) -> Tensor:
    """Apply the repetition penalty (CTRL, Keskar et al. 2019), then presence and frequency
    penalties.

    For tokens in the history, the repetition penalty divides positive logits and multiplies
    negative ones. For tokens of the output, the presence penalty is subtracted once and the
    frequency penalty once per occurrence. Row r has the history r // (R / B); rows whose history
    starts with -1 are not changed.
    """
    if not history.shape[1] or not len(logits):
        return logits
    if logits.is_cuda:
        return penalties_triton.apply_penalties_triton(
            logits, source, history, positions, prompt_lens, repetition, presence, frequency
        )
    repeats = len(logits) // len(history)
    kept = (history[:, 0] >= 0).repeat_interleave(repeats) & (positions > 0)
    rows = kept.nonzero().squeeze(1)
    positions_of_tokens = torch.arange(min(history.shape[1], int(positions.max())))
    history = history[rows // repeats, : len(positions_of_tokens)]
    known = (history >= 0) & (positions_of_tokens < _of(positions, rows))
    # Entries that are not tokens of the history repeat its first token, whose logit is then written
    # several times with the same value.
    tokens = torch.where(known, history, history[:, :1])
    generated = known & (positions_of_tokens >= _of(prompt_lens, rows))
    counts = torch.zeros(len(rows), logits.shape[1])
    counts = counts.scatter_add_(1, tokens, generated.float()).gather(1, tokens)

    before = source[rows.unsqueeze(1), tokens].float()
    factor = _of(repetition, rows)
    after = torch.where(before > 0, before / factor, before * factor)
    after -= _of(frequency, rows) * counts
    after -= _of(presence, rows) * (counts > 0)
    after.clamp_(-_LARGEST, _LARGEST)  # no penalty excludes a token
    logits[rows.unsqueeze(1), tokens] = torch.where(before > -_INF, after, before)
    return logits


def apply_ban(logits: Tensor, token_ids: Tensor, banned: Tensor) -> Tensor:
    """Exclude the tokens `token_ids` in the rows where `banned` [R] is true, unless no token would
    remain.

    `token_ids` is [R, S] int64; ids outside the vocabulary, such as the filler -1, are ignored.
    """
    if logits.is_cuda:
        return penalties_triton.apply_ban_triton(logits, token_ids, banned)
    active = (token_ids >= 0) & (token_ids < logits.shape[1]) & banned.unsqueeze(1)
    indices = torch.where(active, token_ids, 0)
    before = logits.gather(1, indices)
    # amin and amax, not a plain write, because filler entries share column 0 with real ones.
    logits.scatter_reduce_(1, indices, torch.where(active, -_INF, _INF), "amin")
    empty = logits.amax(-1, keepdim=True) == -_INF
    restored = torch.where(active & empty, before, -_INF)
    return logits.scatter_reduce_(1, indices, restored, "amax")


def apply_temperature(logits: Tensor, temperature: Tensor) -> Tensor:
    """Compute (logits - row maximum) / temperature in place; rows of temperature 1 are not changed.

    Without the shift, a low temperature would make large logits overflow.
    """
    top = logits.amax(-1)
    shift = torch.where((temperature == 1) | (top == -_INF), 0, top)
    return logits.sub_(shift.unsqueeze(1)).div_(temperature.unsqueeze(1))


def filter_top_k_top_p_min_p(logits: Tensor, top_k: Tensor, top_p: Tensor, min_p: Tensor) -> Tensor:
    """Exclude unlikely tokens: by top-k, then by top-p of the rest, then by min-p.

    Each filter is a threshold on the logit. Ties with the last kept token are kept, so no sort
    order matters, and the most likely token always stays. top_k [R] int64 keeps that many tokens
    (0: off). top_p [R] keeps a token if the probabilities of more likely ones sum to less than
    top_p (1: off). min_p [R] keeps a token if its probability is at least min_p times the highest
    (0: off). The logits have been divided by the temperature.
    """
    if logits.is_cuda:
        ones = torch.ones_like(min_p)
        threshold = filter_triton.thresholds(logits, ones, top_k, top_p, min_p)
        return logits.masked_fill_(logits < threshold.unsqueeze(1), -_INF)
    threshold = torch.full_like(min_p, -_INF)
    limited = ((top_k > 0) & (top_k < logits.shape[1])).nonzero().squeeze(1)
    if len(limited):
        threshold[limited] = _kth_largest(logits[limited], top_k[limited])
        logits.masked_fill_(logits < threshold.unsqueeze(1), -_INF)
    nucleus = (top_p < 1).nonzero().squeeze(1)
    if len(nucleus):
        threshold[nucleus] = _top_p_threshold(logits[nucleus], top_p[nucleus])
    threshold = threshold.maximum(logits.amax(-1) + min_p.log())
    return logits.masked_fill_(logits < threshold.unsqueeze(1), -_INF)


def _kth_largest(logits: Tensor, k: Tensor) -> Tensor:
    """Return the k-th largest logit of each row, [R], for k [R]."""
    vocab = logits.shape[1]
    k = torch.where(k > 0, k, vocab).clamp(max=vocab)
    return logits.topk(int(k.max())).values.gather(1, k.unsqueeze(1) - 1).squeeze(1)


def _top_p_threshold(logits: Tensor, top_p: Tensor) -> Tensor:
    """Return the logit [R] at which top_p is reached. The 128 most likely tokens are tried first;
    the bits are the same."""
    vocab = logits.shape[1]
    out = torch.full_like(top_p, -_INF)
    probs = logits.softmax(-1)
    rows = torch.arange(len(logits))
    width = 128
    while len(rows):
        width = min(width, vocab)
        values, columns = logits[rows].topk(width)
        mass = probs[rows].gather(1, columns).cumsum(-1, dtype=torch.float64)
        short = mass < top_p[rows].unsqueeze(1)
        last = short.sum(-1, keepdim=True).clamp(max=width - 1)
        reached = values.gather(1, last).squeeze(1)
        # The rounded sum can reach 1 before the last token, so a row with top_p = 1, whose filter
        # is off, gets -inf here.
        out[rows] = torch.where(top_p[rows] < 1, reached, -_INF)
        if width == vocab:
            break
        rows = rows[short[:, -1]]
        width *= 8
    return out


def logprobs_of(logits: Tensor, token_ids: Tensor) -> Tensor:
    """Return log softmax(logits) at token_ids [R]: [R] float32, -inf for an excluded token."""
    return logits.float().log_softmax(-1).gather(1, token_ids.unsqueeze(1)).squeeze(1)


def probability_of(logits: Tensor, token_ids: Tensor) -> Tensor:
    """Return softmax(logits) at token_ids [R]: [R] float32, never above 1."""
    return logits.float().softmax(-1).gather(1, token_ids.unsqueeze(1)).squeeze(1)


def entropy_of(logits: Tensor) -> Tensor:
    """Return the entropy of softmax(logits) in nats, [R] float32; NaN for a row without a token."""
    if logits.is_cuda:
        return entropy_triton.entropy_of_triton(logits, torch.ones_like(logits[:, 0]), None)
    out = torch.empty(len(logits), dtype=torch.float32)
    for start in range(0, len(logits), _ROWS_IN_CACHE):  # the sums are as large as the logits
        rows = slice(start, start + _ROWS_IN_CACHE)
        parts = torch.special.entr(logits[rows].float().softmax(-1))
        out[rows] = parts.cumsum(-1, dtype=torch.float64)[:, -1].float()
    return out


def top_logprobs(logits: Tensor, k: int) -> tuple[Tensor, Tensor]:
    """Return the k most likely tokens of each row, ordered by descending logit and then by
    ascending id.

    Returns ids [R, k] int32 and log-probabilities [R, k] float32, padded with -1 and -inf if fewer
    than k tokens are not excluded.
    """
    if logits.is_cuda:
        ones = torch.ones_like(logits[:, 0], dtype=torch.float32)
        raw = torch.zeros_like(ones, dtype=torch.bool)
        return top_logprobs_triton.top_logprobs_triton(logits, logits, ones, None, raw, k)
    logprobs = logits.float().log_softmax(-1)
    last = logprobs.topk(min(k, logits.shape[1])).values[:, -1:]
    columns, present = _columns_of((logprobs >= last) & (logprobs > -_INF))
    candidates = logprobs.gather(1, columns).masked_fill_(~present, -_INF)
    values, order = candidates.sort(dim=-1, descending=True, stable=True)
    ids = columns.gather(1, order)
    values = F.pad(values, (0, max(0, k - values.shape[1])), value=-_INF)[:, :k]
    ids = F.pad(ids, (0, max(0, k - ids.shape[1])), value=-1)[:, :k]
    return ids.masked_fill(values == -_INF, -1).int(), values


def _of(values: Tensor, rows: Tensor) -> Tensor:
    """Return the values [R] of some rows as a column, [rows, 1]."""
    return values[rows].unsqueeze(1)
