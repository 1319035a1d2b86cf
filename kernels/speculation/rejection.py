"""Speculative sampling by rejection (Leviathan et al. 2023; Chen et al. 2023).

A draft that was drawn from the law q is accepted with probability min(1, p / q), where p is the law
of the model. The first draft that is not accepted is replaced by a draw from (p - q)+, the positive
part of p - q, normalised. If all are accepted, one more token is drawn, the bonus. The tokens then
have exactly the law p, whatever q is.

All random numbers are keyed by the absolute position of the token that they decide (`philox`). So
what a row yields does not depend on the other rows of its batch. Numbers at positions that a step
drafted in vain were not used for any token that was kept, so they can be used again.

On CUDA the functions run the Triton kernels of `rejection_triton`.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from batchgen.kernels.sampling.philox import Stream, gumbel_noise, philox, uniform
from batchgen.kernels.sampling.sampling import sample
from batchgen.kernels.speculation import rejection_triton

_INF = float("inf")


class Verified(NamedTuple):
    """What `verify` returns for B rows of up to k drafts.

    Attributes:
        num_tokens: [B] int32, the number of accepted drafts plus one; 0 for rows that failed.
        token_ids: [B, k + 1] int64, the accepted drafts and the token after them. Undefined from
            num_tokens on, but always in the vocabulary.
        failed: [B] bool, whether the logits at one of the row's positions up to its last token hold
            NaN or +inf, or exclude every token. No draft is accepted on such logits.
    """

    num_tokens: Tensor
    token_ids: Tensor
    failed: Tensor


def verify(
    logits: Tensor,
    drafts: Tensor,
    num_drafts: Tensor,
    draft_probs: Tensor | None,
    seeds: Tensor,
    positions: Tensor,
    greedy: Tensor,
) -> Verified:
    """Accept the first drafts of each row, as many as hold, and draw the token that follows them.

    p is softmax(logits). A row that is not greedy accepts a draft if u · q(draft) < p(draft), where
    u is uniform in (0, 1). After the first rejection it draws from (p - q)+, or from p if rounding
    left nothing of that. After no rejection it makes the draw of `sampling.sample`, to the bit. A
    greedy row accepts drafts that are the argmax (of equal logits the lowest id), and ends with the
    argmax. Excluded tokens (logit -inf) are neither accepted nor drawn.

    Args:
        logits: [B · (k + 1), V] float32, with all sampling options applied. Row b · (k + 1) + j is
            what the model gave for the token after j drafts of row b. Rows with j > num_drafts are
            not read.
        drafts: [B, k] int64 in the vocabulary. Anything beyond num_drafts.
        num_drafts: [B] int32 in [0, k].
        draft_probs: [B, k, V] float32, the law q that each draft was drawn from. Anything beyond
            num_drafts. None if q is a point mass at the draft. Greedy rows ignore q.
        seeds: [B] int64.
        positions: [B] int64, the absolute position of the token at j = 0.
        greedy: [B] bool.
    """
    if logits.is_cuda:
        return Verified(
            *rejection_triton.verify(
                logits, drafts, num_drafts, draft_probs, seeds, positions, greedy
            )
        )
    batch, k = drafts.shape
    logits = logits.view(batch, k + 1, -1)
    accepted = torch.zeros(batch, dtype=torch.int64)
    for j in range(k):
        rows = ((accepted == j) & (j < num_drafts)).nonzero().squeeze(1)
        keys = (seeds[rows], positions[rows] + j)
        q = None if draft_probs is None else draft_probs[rows, j]
        accepted[rows] += _accepts(logits[rows, j], drafts[rows, j], q, *keys, greedy[rows])

    last = logits[torch.arange(batch), accepted]
    failed = ~last.amax(-1).isfinite()  # a NaN anywhere in a row is its maximum
    tokens = sample(last, seeds, positions + accepted, greedy)
    rows = ((accepted < num_drafts) & ~greedy & ~failed).nonzero().squeeze(1)
    if len(rows):
        at = accepted[rows]
        keys = (seeds[rows], positions[rows] + at)
        q = None if draft_probs is None else draft_probs[rows, at]
        tokens[rows] = _recover(last[rows], drafts[rows, at], q, *keys)

    token_ids = tokens.unsqueeze(1).repeat(1, k + 1)
    kept = torch.arange(k) < accepted.unsqueeze(1)
    token_ids[:, :k] = torch.where(kept, drafts, token_ids[:, :k])
    return Verified(torch.where(failed, 0, accepted + 1).int(), token_ids, failed)


def _accepts(
    logits: Tensor,
    drafts: Tensor,
    q: Tensor | None,
    seeds: Tensor,
    positions: Tensor,
    greedy: Tensor,
) -> Tensor:
    """[R] bool, whether the draft of each row is accepted. `logits` and `q` are [R, V], all others
    [R]."""
    columns = drafts.unsqueeze(1)
    threshold = uniform(philox(seeds, positions, 0, Stream.ACCEPT, 1))
    if q is not None:
        threshold = threshold * q.gather(1, columns)
    likely = (threshold < logits.softmax(-1).gather(1, columns)).squeeze(1)
    accepts = torch.where(greedy, drafts == logits.argmax(-1), likely)
    return accepts & logits.amax(-1).isfinite()


def _recover(
    logits: Tensor, drafts: Tensor, q: Tensor | None, seeds: Tensor, positions: Tensor
) -> Tensor:
    """[R] int64, a draw from (p - q)+ by the Gumbel-max trick, or from p where (p - q)+ is zero
    everywhere."""
    noise = gumbel_noise(philox(seeds, positions, 0, Stream.RECOVER, logits.shape[1]))
    plain = logits + noise
    if q is None:
        scores = plain.scatter(1, drafts.unsqueeze(1), -_INF)
    else:
        scores = (logits.softmax(-1) - q).clamp(min=0).log() + noise
    nothing = scores.amax(-1, keepdim=True) == -_INF
    return torch.where(nothing, plain, scores).argmax(-1)


def draw_drafts(
    logits: Tensor, seeds: Tensor, positions: Tensor, greedy: Tensor
) -> tuple[Tensor, Tensor]:
    """Draw one draft for each row, as a proposer does, and tell the law q that `verify` must know.

    Args:
        logits: [B, V] float32 of the draft model, with all sampling options applied.
        seeds: [B] int64.
        positions: [B] int64, the absolute position of the draft.
        greedy: [B] bool, whether a row takes the argmax.

    Returns:
        the drafts [B] int64, and q [B, V] float32. q is softmax(logits), or a point mass at the
        draft for greedy rows and for rows whose logits hold NaN or +inf or exclude every token.
    """
    if logits.is_cuda:
        return rejection_triton.draw_drafts(logits, seeds, positions, greedy)
    drafts = sample(logits, seeds, positions, greedy, Stream.DRAFT)
    point = greedy | ~logits.amax(-1).isfinite()
    mass = torch.zeros_like(logits).scatter_(1, drafts.unsqueeze(1), 1.0)
    return drafts, torch.where(point.unsqueeze(1), mass, logits.softmax(-1))
