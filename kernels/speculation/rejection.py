"""Speculative sampling by rejection (Leviathan et al. 2023; Chen et al. 2023).

A draft drawn from the distribution q is accepted with probability min(1, p / q), where p is the
target model's distribution. The first rejected draft is replaced by a draw from (p - q)+, the
positive part of p - q, normalised. If all drafts are accepted, one more token is drawn, the bonus
token. The tokens then have exactly the distribution p, whatever q is.

Random numbers are keyed by the absolute position of the token that they decide (`philox`), so a row
does not depend on its batch. Numbers at positions whose drafts were rejected decided no kept token,
so they can be used again. On CUDA the kernels of `rejection_triton` run.
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
    """The result of `verify` for B rows of up to k drafts."""

    num_tokens: Tensor  # [B] int32, accepted drafts plus one; 0 for rows that failed
    token_ids: Tensor  # [B, k + 1] int64, in the vocabulary; undefined from num_tokens on
    failed: Tensor  # [B] bool: logits up to the last token hold NaN or +inf or exclude all


def verify(
    logits: Tensor,  # [B · (k + 1), V] float32, with all sampling options applied
    drafts: Tensor,  # [B, k] int64 in the vocabulary
    num_drafts: Tensor,  # [B] int32 in [0, k]
    draft_probs: Tensor | None,  # [B, k, V] float32, q; None: a point mass. Greedy rows ignore it
    seeds: Tensor,
    positions: Tensor,  # [B] int64, of the token at j = 0
    greedy: Tensor,
) -> Verified:
    """Accept the longest valid prefix of each row's drafts, and draw the token that follows it.

    p is softmax(logits). A row that is not greedy accepts a draft if u · q(draft) < p(draft), with
    u uniform in (0, 1). After the first rejection it draws from (p - q)+, or from p if rounding
    left (p - q)+ zero. After no rejection it makes the draw of `sampling.sample`, to the bit. A
    greedy row accepts drafts that are the argmax (of equal logits the lowest id), and ends with the
    argmax. Excluded tokens (logit -inf) are neither accepted nor drawn.

    Row b · (k + 1) + j of the logits is for the token after j drafts of row b; rows with j >
    num_drafts are not read.
    """
    if logits.is_cuda:
        return Verified(
            *rejection_triton.verify_triton(
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
        rejected = accepted[rows]  # the index of each row's first rejected draft
        keys = (seeds[rows], positions[rows] + rejected)
        q = None if draft_probs is None else draft_probs[rows, rejected]
        tokens[rows] = _recover(last[rows], drafts[rows, rejected], q, *keys)

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
    """Return whether the draft of each row is accepted, [R]; `logits` and `q` are [R, V]."""
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
    """Draw [R] from (p - q)+ by the Gumbel-max trick, or from p where (p - q)+ is zero
    everywhere."""
    noise = gumbel_noise(philox(seeds, positions, 0, Stream.RECOVER, logits.shape[1]))
    scores_of_p = logits + noise
    if q is None:
        scores = scores_of_p.scatter(1, drafts.unsqueeze(1), -_INF)
    else:
        scores = (logits.softmax(-1) - q).clamp(min=0).log() + noise
    is_zero = scores.amax(-1, keepdim=True) == -_INF
    return torch.where(is_zero, scores_of_p, scores).argmax(-1)


def draw_drafts(
    logits: Tensor, seeds: Tensor, positions: Tensor, greedy: Tensor
) -> tuple[Tensor, Tensor]:
    """Draw one draft for each row, as a proposer does, and return it with its distribution q.

    `logits` [B, V] are the draft model's, with all sampling options applied; `positions` [B] are
    the drafts'. Returns the drafts [B] int64 and q [B, V] float32, which `verify` needs:
    softmax(logits), or a point mass at the draft for greedy rows and for rows whose logits hold NaN
    or +inf or exclude every token.
    """
    if logits.is_cuda:
        return rejection_triton.draw_drafts_triton(logits, seeds, positions, greedy)
    drafts = sample(logits, seeds, positions, greedy, Stream.DRAFT)
    is_point_mass = greedy | ~logits.amax(-1).isfinite()
    point_mass = torch.zeros_like(logits).scatter_(1, drafts.unsqueeze(1), 1.0)
    return drafts, torch.where(is_point_mass.unsqueeze(1), point_mass, logits.softmax(-1))
