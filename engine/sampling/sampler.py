"""The sampler: the one place where logits become tokens and log-probabilities, for every strategy.

`sample_tokens` draws a token for each row; `draw_tokens` does the same for strategies that then
decide which tokens become output; `score_tokens` describes given tokens. R is the number of rows of
logits (several for each row of the batch after `SamplingInputs.repeat`), and V the size of the
vocabulary.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from batchgen.engine.interface.outputs import StepOutput
from batchgen.engine.sampling.logits import Logits
from batchgen.engine.sampling.processed_logits import exclude, process, scale_and_filter
from batchgen.engine.sampling.sampler_columns import (
    ANSWER_PREFIX,
    ENTROPY,
    LOGPROBS,
    TOP_LOGPROB_IDS,
    TOP_LOGPROBS,
)
from batchgen.engine.sampling.sampling_inputs import SamplingInputs
from batchgen.kernels.sampling import (
    entropy_triton,
    filter_triton,
    sampling_triton,
    top_logprobs_triton,
)
from batchgen.kernels.sampling import sampling as kernels
from batchgen.kernels.sampling.sampling_triton import Share
from batchgen.kernels.sampling.token_mask import TokenMask


class Drawn(NamedTuple):
    """One token for each of R rows of logits. The strategy decides which of them become output.

    Failed rows are those whose logits have NaN or +inf, or are -inf everywhere. For them only
    `failed` is defined. In rows with a conflict, the mask and the other options left no token; for
    them only `failed` and `conflict` are defined.
    """

    token_ids: Tensor  # [R] int64
    failed: Tensor  # [R] bool
    columns: dict[str, Tensor]  # name → [R, *tail], all columns that any row asks for
    # [R] float32: the probability of the token when it was drawn (for greedy rows, before filters)
    confidence: Tensor | None
    conflict: Tensor | None = None  # [R] bool; None without a mask
    # [R] float32, in nats: the entropy of the distribution that the token was drawn from, if
    # requested
    entropy: Tensor | None = None


def sample_tokens(
    logits: Tensor | Logits,
    sampling: SamplingInputs,
    positions: Tensor,
    *,
    mask: TokenMask | None = None,
) -> StepOutput:
    """Sample one token for each row of logits, with the columns that any row asks for.

    Returns a step of R rows with W = 1. Rows that failed, or whose mask left no token, have no
    token in it. Top log-probabilities are as wide as the largest K of the batch; entries that a row
    did not ask for are undefined.

    Args:
        positions: [R], the positions of the tokens to be sampled.
        mask: the tokens that constraints allow; None allows all.
    """
    if isinstance(logits, Logits):
        share = None if mask is not None else logits.share_for(sampling)
        if share is not None:
            drawn = _draw_fused(logits.own, sampling, positions, share=share)
            return _step_output(drawn)
        logits = logits.whole()
    return _step_output(draw_tokens(logits, sampling, positions, mask=mask))


def draw_tokens(
    logits: Tensor,
    sampling: SamplingInputs,
    positions: Tensor,
    draws: Tensor | None = None,
    *,
    confidence: bool = False,
    entropy: bool = False,
    mask: TokenMask | None = None,
) -> Drawn:
    """Draw a token for each row of logits, for strategies that decide which tokens become output.

    Args:
        positions: [R], the positions of the tokens. They and `draws` must be contiguous, for the
            kernels.
        draws: [R], the number of earlier draws at the position, which selects other random numbers;
            None means 0.
        confidence: whether to compute `Drawn.confidence`.
        entropy: whether to compute `Drawn.entropy`.
    """
    assert positions.is_contiguous() and (draws is None or draws.is_contiguous())
    if logits.is_cuda:
        options = {"confidence": confidence, "entropy": entropy}
        return draw_fused(logits, sampling, positions, draws, **options, mask=mask)
    left, empty = exclude(logits, sampling, positions, mask)
    processed = scale_and_filter(left, logits, sampling)
    if sampling.all_greedy:
        token_ids = processed.argmax(-1)
    else:
        token_ids = kernels.sample(
            processed, sampling.seeds, positions, sampling.greedy, draws=draws
        )
    failed = ~logits.amax(-1).isfinite()  # the maximum of a row with a NaN is NaN
    columns = describe(logits, processed, sampling, token_ids)
    probabilities = kernels.probability_of(processed, token_ids) if confidence else None
    entropies = kernels.entropy_of(processed) if entropy else None
    return Drawn(token_ids, failed, columns, probabilities, _conflict(empty, failed), entropies)


def _conflict(empty: Tensor | None, failed: Tensor) -> Tensor | None:
    """Return the rows without a token left whose logits are finite; None without a mask."""
    return None if empty is None else empty & ~failed


def describe(
    logits: Tensor, processed: Tensor, sampling: SamplingInputs, token_ids: Tensor
) -> dict[str, Tensor]:
    """Compute the sampler's output columns that any row asks for, as name → [R, *tail].

    Args:
        logits: [R, V], the model's logits.
        processed: [R, V], the result of `process`.
        token_ids: [R], the chosen tokens.
    """
    source = logits
    if sampling.any_processed_logprobs:
        source = torch.where(sampling.processed_logprobs.unsqueeze(1), processed, logits)
    columns: dict[str, Tensor] = {}
    if sampling.any_logprobs:
        columns[LOGPROBS.name] = kernels.logprobs_of(source, token_ids)
    if sampling.max_top_logprobs:
        ids, values = kernels.top_logprobs(source, sampling.max_top_logprobs)
        columns |= {TOP_LOGPROB_IDS.name: ids, TOP_LOGPROBS.name: values}
    if sampling.any_entropy:
        columns[ENTROPY.name] = kernels.entropy_of(source)
    return columns


def score_tokens(
    logits: Tensor, sampling: SamplingInputs, positions: Tensor, token_ids: Tensor
) -> StepOutput:
    """Score given tokens, with the same bits as `sample_tokens` describes tokens that it draws.

    Returns a step of R rows with W = 1 and columns of answer scope.

    Args:
        positions: [R], the positions of the tokens. If the row has penalties, its history must hold
            all tokens before them.
        token_ids: [R], the tokens.
    """
    return _scored(take_tokens(logits, sampling, positions, token_ids))


def take_tokens(
    logits: Tensor, sampling: SamplingInputs, positions: Tensor, token_ids: Tensor
) -> Drawn:
    """Describe given tokens [R], with the same bits as `draw_tokens` describes tokens that it
    draws, but without confidence."""
    if logits.is_cuda:
        return _draw_fused(logits, sampling, positions, scored_ids=token_ids)
    processed = logits
    if sampling.any_processed_logprobs:
        processed = process(logits, sampling, positions)
    failed = ~logits.amax(-1).isfinite()
    return Drawn(token_ids, failed, describe(logits, processed, sampling, token_ids), None)


def score_fused(
    logits: Tensor, sampling: SamplingInputs, positions: Tensor, token_ids: Tensor
) -> StepOutput:
    """Compute `score_tokens` with the fused Triton kernels, on any device."""
    return _scored(_draw_fused(logits, sampling, positions, scored_ids=token_ids))


def _scored(drawn: Drawn) -> StepOutput:
    return StepOutput(
        num_tokens=torch.ones_like(drawn.failed, dtype=torch.int32),
        token_ids=drawn.token_ids.unsqueeze(1),
        failed=drawn.failed,
        columns={
            ANSWER_PREFIX + name: values.unsqueeze(1) for name, values in drawn.columns.items()
        },
    )


def sample_fused(
    logits: Tensor, sampling: SamplingInputs, positions: Tensor, *, mask: TokenMask | None = None
) -> StepOutput:
    """Compute `sample_tokens` with the fused Triton kernels, on any device."""
    return _step_output(draw_fused(logits, sampling, positions, mask=mask))


def draw_fused(
    logits: Tensor,
    sampling: SamplingInputs,
    positions: Tensor,
    draws: Tensor | None = None,
    *,
    confidence: bool = False,
    entropy: bool = False,
    mask: TokenMask | None = None,
) -> Drawn:
    """Compute `draw_tokens` with the fused Triton kernels, on any device.

    The kernel applies temperature and filters while it reads the logits, once; only penalties, bans
    and masks need a copy. The host never waits. Tokens differ from those of `draw_tokens` only if
    two scores are so close that rounding decides.
    """
    return _draw_fused(logits, sampling, positions, draws, confidence, mask, entropy=entropy)


def _draw_fused(
    logits: Tensor,
    sampling: SamplingInputs,
    positions: Tensor,
    draws: Tensor | None = None,
    confidence: bool = False,
    mask: TokenMask | None = None,
    *,
    entropy: bool = False,
    scored_ids: Tensor | None = None,
    share: Share | None = None,
) -> Drawn:
    """Compute `draw_fused`, or with `scored_ids` [R] the same results for these tokens instead of
    drawn ones. With a `share`, `logits` are the columns of this rank (`Logits.share_for`)."""
    left, empty = exclude(logits, sampling, positions, mask)
    threshold = None
    if sampling.any_filters:
        threshold = filter_triton.thresholds(
            left, sampling.temperature, sampling.top_k, sampling.top_p, sampling.min_p
        )
    drawn = sampling_triton.draw_triton(
        left,
        logits,
        sampling.temperature,
        threshold,
        sampling.seeds,
        positions,
        sampling.greedy,
        sampling.processed_logprobs if sampling.any_logprobs else None,
        draws=draws,
        confidence=confidence,
        scored_ids=scored_ids,
        share=share,
    )
    columns: dict[str, Tensor] = {}
    if drawn.logprobs is not None:
        columns[LOGPROBS.name] = drawn.logprobs
    if sampling.max_top_logprobs:
        ids, values = top_logprobs_triton.top_logprobs_triton(
            left,
            logits,
            sampling.temperature,
            threshold,
            sampling.processed_logprobs,
            sampling.max_top_logprobs,
        )
        columns |= {TOP_LOGPROB_IDS.name: ids, TOP_LOGPROBS.name: values}
    conflict = _conflict(empty, drawn.failed)
    entropies = None
    if entropy:
        entropies = entropy_triton.entropy_of_triton(left, sampling.temperature, threshold)
    if sampling.any_entropy:
        source = logits
        if sampling.any_processed_logprobs:  # this may overwrite `left`
            processed = scale_and_filter(left, logits, sampling)
            source = torch.where(sampling.processed_logprobs.unsqueeze(1), processed, logits)
        columns[ENTROPY.name] = kernels.entropy_of(source)
    return Drawn(drawn.token_ids, drawn.failed, columns, drawn.confidence, conflict, entropies)


def _step_output(drawn: Drawn) -> StepOutput:
    """Return a step of one token for each row; none for rows that failed or had a conflict."""
    conflict = drawn.conflict
    ends = drawn.failed if conflict is None else drawn.failed | conflict
    return StepOutput(
        num_tokens=(~ends).int(),
        token_ids=drawn.token_ids.unsqueeze(1),
        failed=drawn.failed,
        columns={name: values.unsqueeze(1) for name, values in drawn.columns.items()},
        conflicts=conflict,
    )
