"""The sampler: the one place where logits become tokens and log-probabilities, for every strategy.

R is the number of rows of logits and V the size of the vocabulary. A batch may have several rows of
logits for each of its rows (`SamplingInputs.repeat`).
"""

from __future__ import annotations

from dataclasses import replace
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from batchgen.engine.base.outputs import OutputColumn, StepOutput
from batchgen.engine.sampling.sampling_inputs import SamplingInputs
from batchgen.engine.sampling.sampling_params import SamplingParams
from batchgen.kernels.sampling import filter_triton, sampling_triton, top_logprobs_triton
from batchgen.kernels.sampling import sampling as kernels
from batchgen.kernels.sampling.token_mask import TokenMask, apply_token_mask

LOGPROBS = OutputColumn("logprobs", np.dtype(np.float32))
"""The log-probability of each generated token."""
# The tail shape of these two is the row's own K, which `requested_columns` puts in.
TOP_LOGPROBS = OutputColumn("top_logprobs", np.dtype(np.float32), (0,))
"""The log-probabilities of the K most likely tokens at each position."""
TOP_LOGPROB_IDS = OutputColumn("top_logprob_ids", np.dtype(np.int32), (0,))
"""The ids of those K tokens."""

_INF = float("inf")


class Drawn(NamedTuple):
    """One token for each of R rows of logits. The strategy decides which of them become output.

    Attributes:
        token_ids: [R] int64, the drawn tokens.
        failed: [R] bool, rows whose logits hold NaN or +inf, or are -inf everywhere. The other
            fields are undefined there.
        columns: name of an output column → [R, *tail], for all columns that any row asks for.
        confidence: [R] float32 in [0, 1], the probability of the token under the distribution that
            it was drawn from. For a greedy row that is the distribution after penalties, ban and
            mask. None if it was not asked for.
        conflict: [R] bool, rows that did not fail, but for which the mask and the other options
            left no token. The fields above except `failed` are undefined there. None without a
            mask.
    """

    token_ids: Tensor
    failed: Tensor
    columns: dict[str, Tensor]
    confidence: Tensor | None
    conflict: Tensor | None = None


def requested_columns(params: SamplingParams) -> tuple[OutputColumn, ...]:
    """The sampler's output columns that a row with these options asks for, with the row's K as the
    tail shape of the top log-probabilities."""
    columns = [LOGPROBS] if params.logprobs else []
    if params.top_logprobs:
        tail = (params.top_logprobs,)
        columns.append(replace(TOP_LOGPROBS, tail_shape=tail))
        columns.append(replace(TOP_LOGPROB_IDS, tail_shape=tail))
    return tuple(columns)


def process(
    logits: Tensor, sampling: SamplingInputs, positions: Tensor, *, mask: TokenMask | None = None
) -> Tensor:
    """Compute the logits of the distribution that rows are sampled from.

    The options apply in this order: penalties, the ban of stop ids before min_new_tokens (dropped
    for a row in which it would leave no token), the mask, temperature, top-k, top-p, min-p. The
    filters come after the mask so that they choose among the allowed tokens; before it, they would
    often leave none of those.

    Args:
        logits: [R, V] in any floating dtype, finite or -inf.
        sampling: the options of the R rows of logits.
        positions: [R] int64, the absolute position of the token that is to be sampled.
        mask: the tokens that each row may take; None allows all.

    Returns:
        [R, V] float32, with -inf for excluded tokens. A row is -inf everywhere only if its logits
        were or if the mask left nothing. May be the logits themselves if no option applies.
    """
    left, _ = _exclude(logits, sampling, positions, mask)
    return _scale_and_filter(left, logits, sampling)


def _exclude(
    logits: Tensor, sampling: SamplingInputs, positions: Tensor, mask: TokenMask | None
) -> tuple[Tensor, Tensor | None]:
    """Apply the part of `process` that excludes tokens: penalties, ban and mask.

    Returns:
        [R, V], in float32 or the dtype of the logits, and the logits themselves if nothing applies;
        and [R] bool, the rows for which no token is left, or None without a mask.
    """
    out = _penalised(logits, sampling, positions)
    if mask is None:
        return out, None
    return apply_token_mask(out, mask, out=None if out is logits else out)


def _scale_and_filter(left: Tensor, logits: Tensor, sampling: SamplingInputs) -> Tensor:
    """Apply temperature and the filters to what `_exclude` returned. `left` may be overwritten
    unless it is the logits themselves. Returns [R, V] float32."""
    if not (sampling.any_temperature or sampling.any_filters):
        return left.float()
    out = _float_copy(logits) if left is logits else left.float()
    if sampling.any_temperature:
        kernels.apply_temperature(out, sampling.temperature)
    if sampling.any_filters:
        kernels.filter_top_k_top_p_min_p(out, sampling.top_k, sampling.top_p, sampling.min_p)
    return out


def _penalised(logits: Tensor, sampling: SamplingInputs, positions: Tensor) -> Tensor:
    """Apply penalties and the ban of stop ids. Returns [R, V] float32, or the logits themselves if
    no row has any of them."""
    if not (sampling.any_penalties or sampling.any_min_new_tokens):
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
    return out


def _float_copy(logits: Tensor) -> Tensor:
    """A contiguous float32 copy of the logits, which may be overwritten."""
    return logits.to(torch.float32, copy=True, memory_format=torch.contiguous_format)


def sample(
    logits: Tensor, sampling: SamplingInputs, positions: Tensor, *, mask: TokenMask | None = None
) -> StepOutput:
    """Sample one token for each row of logits, with the columns that any row asks for.

    Args:
        logits: [R, V] in any floating dtype.
        sampling: the options of the R rows of logits.
        positions: [R] int64, the absolute position of the token that is to be sampled. Penalties
            count the tokens before it.
        mask: the tokens that each row may take; None allows all.

    Returns:
        a step of R rows with W = 1. Rows that failed or whose mask left no token have no token.
        Top log-probabilities are as wide as the largest K of the batch, and values that a row did
        not ask for are undefined.
    """
    return _step_output(draw(logits, sampling, positions, mask=mask))


def draw(
    logits: Tensor,
    sampling: SamplingInputs,
    positions: Tensor,
    draws: Tensor | None = None,
    *,
    confidence: bool = False,
    mask: TokenMask | None = None,
) -> Drawn:
    """Draw a token for each row of logits, as `sample` does, for strategies that decide themselves
    which of the tokens become output.

    Args:
        logits: [R, V] in any floating dtype.
        sampling: the options of the R rows of logits.
        positions: [R] int64, the absolute position of the token that is to be drawn.
        draws: [R] int64, how many draws the position has had before, because each draw has its own
            random numbers. None means 0 for all.
        confidence: whether to compute `Drawn.confidence`.
        mask: the tokens that each row may take; None allows all.
    """
    if logits.is_cuda:
        return draw_fused(logits, sampling, positions, draws, confidence=confidence, mask=mask)
    left, empty = _exclude(logits, sampling, positions, mask)
    processed = _scale_and_filter(left, logits, sampling)
    if sampling.all_greedy:
        token_ids = processed.argmax(-1)
    else:
        token_ids = kernels.sample(
            processed, sampling.seeds, positions, sampling.greedy, draws=draws
        )
    failed = ~logits.amax(-1).isfinite()  # the maximum of a row with a NaN is NaN
    columns = describe(logits, processed, sampling, token_ids)
    probabilities = kernels.probability_of(processed, token_ids) if confidence else None
    return Drawn(token_ids, failed, columns, probabilities, _conflict(empty, failed))


def _conflict(empty: Tensor | None, failed: Tensor) -> Tensor | None:
    """[R] bool, the rows without a token left (`empty`) whose logits were sound. None without a
    mask."""
    return None if empty is None else empty & ~failed


def describe(
    logits: Tensor, processed: Tensor, sampling: SamplingInputs, token_ids: Tensor
) -> dict[str, Tensor]:
    """Compute the sampler's output columns that any row asks for.

    Args:
        logits: [R, V], as the model gave them.
        processed: [R, V], what `process` made of them.
        sampling: the options of the R rows of logits.
        token_ids: [R] int64, the tokens that were chosen.

    Returns:
        name of the column → [R, *tail].
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
    return columns


def sample_fused(
    logits: Tensor, sampling: SamplingInputs, positions: Tensor, *, mask: TokenMask | None = None
) -> StepOutput:
    """`sample` with the fused Triton kernels, on any device."""
    return _step_output(draw_fused(logits, sampling, positions, mask=mask))


def draw_fused(
    logits: Tensor,
    sampling: SamplingInputs,
    positions: Tensor,
    draws: Tensor | None = None,
    *,
    confidence: bool = False,
    mask: TokenMask | None = None,
) -> Drawn:
    """`draw` with the fused Triton kernels, on any device.

    The kernel that draws applies temperature and filters while it reads the logits, once. The
    logits are copied only if a row has penalties, a ban or a mask. The host never waits. The tokens
    are those of the unfused path unless two scores are so close that rounding decides.
    """
    left, empty = _exclude(logits, sampling, positions, mask)
    threshold = None
    if sampling.any_filters:
        threshold = filter_triton.thresholds(
            left, sampling.temperature, sampling.top_k, sampling.top_p, sampling.min_p
        )
    drawn = sampling_triton.draw(
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
    )
    columns: dict[str, Tensor] = {}
    if drawn.logprobs is not None:
        columns[LOGPROBS.name] = drawn.logprobs
    if sampling.max_top_logprobs:
        ids, values = top_logprobs_triton.top_logprobs(
            left,
            logits,
            sampling.temperature,
            threshold,
            sampling.processed_logprobs,
            sampling.max_top_logprobs,
        )
        columns |= {TOP_LOGPROB_IDS.name: ids, TOP_LOGPROBS.name: values}
    conflict = _conflict(empty, drawn.failed)
    return Drawn(drawn.token_ids, drawn.failed, columns, drawn.confidence, conflict)


def _step_output(drawn: Drawn) -> StepOutput:
    """A step of one token for each row, or none for rows that failed or conflict."""
    conflict = drawn.conflict
    without = drawn.failed if conflict is None else drawn.failed | conflict
    return StepOutput(
        num_tokens=(~without).int(),
        token_ids=drawn.token_ids.unsqueeze(1),
        failed=drawn.failed,
        columns={name: values.unsqueeze(1) for name, values in drawn.columns.items()},
        conflicts=conflict,
    )
