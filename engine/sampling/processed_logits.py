"""Applies sampling options to logits: penalties, bans, the token mask, temperature and filters.

The sampler and the strategies call `process`. R is the number of rows of logits, and V the size of
the vocabulary.
"""

from __future__ import annotations

import torch
from torch import Tensor

from batchgen.engine.sampling.sampling_inputs import SamplingInputs
from batchgen.kernels.sampling import sampling as kernels
from batchgen.kernels.sampling.token_mask import TokenMask, apply_token_mask


def process(
    logits: Tensor, sampling: SamplingInputs, positions: Tensor, *, mask: TokenMask | None = None
) -> Tensor:
    """Compute the logits of the distribution that rows are sampled from, [R, V] float32. May return
    `logits` itself.

    The options apply in this order: penalties, bans (of stop ids before min_new_tokens, and of
    tokens that are never sampled), the mask, temperature, top-k, top-p, min-p. A ban that would
    leave no token is ignored. The filters come after the mask, so that they choose among allowed
    tokens. A row of the result is -inf everywhere only if its logits were, or the mask left no
    token.

    Args:
        positions: [R], the positions of the tokens to be sampled.
    """
    left, _ = exclude(logits, sampling, positions, mask)
    return scale_and_filter(left, logits, sampling)


def exclude(
    logits: Tensor, sampling: SamplingInputs, positions: Tensor, mask: TokenMask | None
) -> tuple[Tensor, Tensor | None]:
    """Apply penalties, bans and the mask. Also returns which rows have no token left, [R] bool;
    None without a mask."""
    out = _penalised(logits, sampling, positions)
    if mask is None:
        return out, None
    return apply_token_mask(out, mask, out=None if out is logits else out)


def scale_and_filter(left: Tensor, logits: Tensor, sampling: SamplingInputs) -> Tensor:
    """Apply temperature and filters to the result `left` of `exclude`, which may be overwritten."""
    if not (sampling.any_temperature or sampling.any_filters):
        return left.float()
    out = _float_copy(logits) if left is logits else left.float()
    if sampling.any_temperature:
        kernels.apply_temperature(out, sampling.temperature)
    if sampling.any_filters:
        kernels.filter_top_k_top_p_min_p(out, sampling.top_k, sampling.top_p, sampling.min_p)
    return out


def _penalised(logits: Tensor, sampling: SamplingInputs, positions: Tensor) -> Tensor:
    """Apply penalties and bans. Returns [R, V] float32, or `logits` itself if there are none."""
    if not (sampling.any_penalties or sampling.any_min_new_tokens or sampling.any_bans):
        return logits
    out = _float_copy(logits)
    if sampling.any_penalties:
        kernels.apply_penalties(
            out,
            logits,
            sampling.history,
            positions,
            sampling.prompt_lens,
            sampling.repetition,
            sampling.presence,
            sampling.frequency,
        )
    if sampling.any_min_new_tokens:
        kernels.apply_ban(out, sampling.stop_ids, positions < sampling.min_positions)
    if sampling.any_bans:
        kernels.apply_ban(out, sampling.banned_ids, torch.ones_like(sampling.greedy))
    return out


def _float_copy(logits: Tensor) -> Tensor:
    """Return a contiguous float32 copy of the logits, which may be overwritten."""
    return logits.to(torch.float32, copy=True, memory_format=torch.contiguous_format)
