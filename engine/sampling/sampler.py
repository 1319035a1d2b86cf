"""The one place where logits become tokens and log-probabilities, for any row of any paradigm."""

from __future__ import annotations

from dataclasses import replace
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from batchgen.engine.outputs import OutputColumn, StepOutput
from batchgen.engine.sampling.inputs import SamplingInputs
from batchgen.engine.sampling.params import SamplingParams
from batchgen.kernels.sampling import filter_triton, sampling_triton, top_logprobs_triton
from batchgen.kernels.sampling import sampling as kernels
from batchgen.kernels.sampling.token_mask import TokenMask, apply_token_mask

LOGPROBS = OutputColumn("logprobs", np.dtype(np.float32))
# Their tail is each row's own K; `requested_columns` sets it.
TOP_LOGPROBS = OutputColumn("top_logprobs", np.dtype(np.float32), (0,))
TOP_LOGPROB_IDS = OutputColumn("top_logprob_ids", np.dtype(np.int32), (0,))

_INF = float("inf")


class Drawn(NamedTuple):
    """One token for each of R logits rows, whether it will count or not.

    Attributes:
        token_ids: [R] int64.
        failed: [R] bool, rows whose logits hold NaN or infinity: all else of them is undefined.
        columns: name → [R, *tail], what any row asks for.
        confidence: [R] float32, in [0, 1]: the probability of the token under the distribution
            that it was drawn from, of a greedy row under the one whose mode it is; None if not
            asked for.
        conflict: [R] bool, rows in which the mask and what else excludes tokens left none: all else
            of them is undefined, but for `failed`, which is False. None without a mask.
    """

    token_ids: Tensor
    failed: Tensor
    columns: dict[str, Tensor]
    confidence: Tensor | None
    conflict: Tensor | None = None


def requested_columns(params: SamplingParams) -> tuple[OutputColumn, ...]:
    """The columns of a row with these parameters, with their shapes."""
    columns = [LOGPROBS] if params.logprobs else []
    if params.top_logprobs:
        tail = (params.top_logprobs,)
        columns.append(replace(TOP_LOGPROBS, tail_shape=tail))
        columns.append(replace(TOP_LOGPROB_IDS, tail_shape=tail))
    return tuple(columns)


def process(
    logits: Tensor, sampling: SamplingInputs, positions: Tensor, *, mask: TokenMask | None = None
) -> Tensor:
    """The logits of the distribution that rows are sampled from.

    In this order: penalties, the ban of stop ids before min_new_tokens (void where the model leaves
    no other token), the mask, temperature, top-k, top-p, min-p. So the filters choose among the
    tokens that the mask allows: before it, they would often leave none of those.

    Args:
        logits: [R, V], any floating dtype, finite or -inf, of the R logits rows of sampling.
        positions: [R] int64, absolute position of the token to be sampled.
        mask: the tokens that each row may take; None allows all.

    Returns:
        [R, V] float32, -inf for excluded tokens, never a row of only those unless it came as one or
        the mask made it so. The logits themselves where nothing applies.
    """
    left, _ = _exclude(logits, sampling, positions, mask)
    return _scale_and_filter(left, logits, sampling)


def _exclude(
    logits: Tensor, sampling: SamplingInputs, positions: Tensor, mask: TokenMask | None
) -> tuple[Tensor, Tensor | None]:
    """After penalties, ban and mask: [R, V] in float32 or the dtype of the logits, or the logits
    themselves if no row has any; and [R] bool, rows whose mask left no token, None without a mask.
    """
    out = _penalised(logits, sampling, positions)
    if mask is None:
        return out, None
    return apply_token_mask(out, mask, out=None if out is logits else out)


def _scale_and_filter(left: Tensor, logits: Tensor, sampling: SamplingInputs) -> Tensor:
    """What `process` makes of the tokens left; only the logits themselves are not overwritten."""
    if not (sampling.any_temperature or sampling.any_filters):
        return left.float()
    out = _float_copy(logits) if left is logits else left.float()
    if sampling.any_temperature:
        kernels.apply_temperature(out, sampling.temperature)
    if sampling.any_filters:
        kernels.filter_top_k_top_p_min_p(out, sampling.top_k, sampling.top_p, sampling.min_p)
    return out


def _penalised(logits: Tensor, sampling: SamplingInputs, positions: Tensor) -> Tensor:
    """After penalties and ban: [R, V] float32, or the logits themselves if no row has any."""
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
    return logits.to(torch.float32, copy=True, memory_format=torch.contiguous_format)


def sample(
    logits: Tensor, sampling: SamplingInputs, positions: Tensor, *, mask: TokenMask | None = None
) -> StepOutput:
    """One token for each logits row, with the columns that any row asks for.

    Args:
        logits: [R, V], any floating dtype, of the R logits rows of sampling.
        positions: [R] int64, absolute position of the token to be sampled; the history that counts
            ends before it.
        mask: the tokens that each row may take; None allows all.

    Returns:
        R rows of W = 1, or no token where the logits hold NaN or infinity or the mask left none.
        Columns have the batch's largest K of top_logprobs; what a row did not ask for is undefined.
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
    """`sample`, before the tokens are any step's output.

    Args:
        draws: [R] int64, how many draws the row's position has had before: each has noise of its
            own; None is 0 for all.
        confidence: whether to return it.
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
    failed = ~logits.amax(-1).isfinite()  # a NaN anywhere in a row is its maximum
    columns = describe(logits, processed, sampling, token_ids)
    probabilities = kernels.probability_of(processed, token_ids) if confidence else None
    return Drawn(token_ids, failed, columns, probabilities, _conflict(empty, failed))


def _conflict(empty: Tensor | None, failed: Tensor) -> Tensor | None:
    """Of rows whose mask left no token, those that have not failed anyway."""
    return None if empty is None else empty & ~failed


def describe(
    logits: Tensor, processed: Tensor, sampling: SamplingInputs, token_ids: Tensor
) -> dict[str, Tensor]:
    """The columns that any row asks for.

    Args:
        logits: [R, V], as the model gave them.
        processed: [R, V], what `process` made of them.
        token_ids: [R] int64, the tokens that were chosen.

    Returns:
        name → [R, *tail].
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
    """`sample` by the Triton kernels, whatever the device."""
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
    """`draw` by the Triton kernels, which read the logits as they are, once for the draw.

    Equal to it but for floating point: a token differs only where two scores all but tie.
    Nothing is copied unless a row has penalties, a ban or a mask, and then once; the host never
    waits.
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
    """Of one token per row."""
    conflict = drawn.conflict
    without = drawn.failed if conflict is None else drawn.failed | conflict
    return StepOutput(
        num_tokens=(~without).int(),
        token_ids=drawn.token_ids.unsqueeze(1),
        failed=drawn.failed,
        columns={name: values.unsqueeze(1) for name, values in drawn.columns.items()},
        conflicts=conflict,
    )
