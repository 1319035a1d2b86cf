"""The sampler: the one place where logits become tokens and log-probabilities, for every strategy.

R is the number of rows of logits, several for each row of the batch after `SamplingInputs.repeat`,
and V the size of the vocabulary.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from batchgen.engine.interface.outputs import OutputColumn, StepOutput
from batchgen.engine.sampling.logits import Logits
from batchgen.engine.sampling.sampling_inputs import SamplingInputs
from batchgen.engine.sampling.sampling_params import RequestParams
from batchgen.kernels.sampling import (
    entropy_triton,
    filter_triton,
    sampling_triton,
    top_logprobs_triton,
)
from batchgen.kernels.sampling import sampling as kernels
from batchgen.kernels.sampling.sampling_triton import Share
from batchgen.kernels.sampling.token_mask import TokenMask, apply_token_mask

LOGPROBS = OutputColumn("logprobs", np.dtype(np.float32))
"""The log-probability of each generated token."""
# The tail shape of these two is the row's own K, which `requested_columns` puts in.
TOP_LOGPROBS = OutputColumn("top_logprobs", np.dtype(np.float32), (0,))
"""The log-probabilities of the K most likely tokens at each position."""
TOP_LOGPROB_IDS = OutputColumn("top_logprob_ids", np.dtype(np.int32), (0,))
"""The ids of those K tokens."""

ENTROPY = OutputColumn("entropy", np.dtype(np.float32))
"""The entropy of the distribution of each generated token, in nats."""

_ANSWER = "answer_"
"""What the names of columns of answer scope begin with."""
ANSWER_TOP_LOGPROBS = _ANSWER + TOP_LOGPROBS.name
ANSWER_REST_PROBS = OutputColumn("answer_rest_probs", np.dtype(np.float32), scope="answer")
"""The probability of all tokens but the K most likely ones at each position of an answer."""
_INF = float("inf")


class Drawn(NamedTuple):
    """One token for each of R rows of logits. The strategy decides which of them become output.

    Failed rows have logits with NaN or +inf, or -inf everywhere. Only `failed` is defined for them,
    and with `conflict` for rows where mask and options left no token.
    """

    token_ids: Tensor  # [R] int64
    failed: Tensor  # [R] bool
    columns: dict[str, Tensor]  # name → [R, *tail], for all columns that any row asks for
    # [R] float32: the token's probability as drawn, greedy rows before filters
    confidence: Tensor | None
    conflict: Tensor | None = None  # [R] bool; None without a mask
    # [R] float32, in nats: of the distribution that the token was drawn from, if asked for
    entropy: Tensor | None = None


def requested_columns(params: RequestParams) -> tuple[OutputColumn, ...]:
    """Return the output columns of the sampler that a row with these options asks for."""
    columns = [LOGPROBS] if params.logprobs else []
    if params.top_logprobs:
        tail = (params.top_logprobs,)
        columns.append(replace(TOP_LOGPROBS, tail_shape=tail))
        columns.append(replace(TOP_LOGPROB_IDS, tail_shape=tail))
    columns += [ENTROPY] if ENTROPY.name in params.columns else []
    if params.scores_answer:
        columns = [replace(c, name=_ANSWER + c.name, scope="answer") for c in columns]
        columns += [ANSWER_REST_PROBS] if params.top_logprobs else []
    return tuple(columns)


def of_answer(columns: Mapping[str, npt.NDArray[Any]]) -> dict[str, npt.NDArray[Any]]:
    """The sampler's columns of generated tokens under the names that those of a given answer have,
    and all others as they are, with the probability of the rest if top log-probabilities are
    there."""
    own = {LOGPROBS.name, TOP_LOGPROBS.name, TOP_LOGPROB_IDS.name, ENTROPY.name}
    out = {_ANSWER + name if name in own else name: v for name, v in columns.items()}
    if ANSWER_TOP_LOGPROBS in out:
        out[ANSWER_REST_PROBS.name] = rest_probs(out[ANSWER_TOP_LOGPROBS])
    return out


def process(
    logits: Tensor, sampling: SamplingInputs, positions: Tensor, *, mask: TokenMask | None = None
) -> Tensor:
    """Compute the logits of the distribution that rows are sampled from, as [R, V] float32.

    The options apply in this order: penalties, the bans of stop ids before min_new_tokens and of
    tokens that are never sampled (unless a ban leaves no token), the mask, temperature, top-k,
    top-p, min-p. The filters come after the mask so that they choose among allowed tokens.
    `positions` [R] belong to the tokens to be sampled. A row is -inf everywhere only if its logits
    were or the mask left nothing. May return the logits themselves.
    """
    left, _ = _exclude(logits, sampling, positions, mask)
    return _scale_and_filter(left, logits, sampling)


def _exclude(
    logits: Tensor, sampling: SamplingInputs, positions: Tensor, mask: TokenMask | None
) -> tuple[Tensor, Tensor | None]:
    """Apply penalties, ban and mask; also return which rows have no token left, with a mask."""
    out = _penalised(logits, sampling, positions)
    if mask is None:
        return out, None
    return apply_token_mask(out, mask, out=None if out is logits else out)


def _scale_and_filter(left: Tensor, logits: Tensor, sampling: SamplingInputs) -> Tensor:
    """Apply temperature and filters to `_exclude`'s result, which may be overwritten."""
    if not (sampling.any_temperature or sampling.any_filters):
        return left.float()
    out = _float_copy(logits) if left is logits else left.float()
    if sampling.any_temperature:
        kernels.apply_temperature(out, sampling.temperature)
    if sampling.any_filters:
        kernels.filter_top_k_top_p_min_p(out, sampling.top_k, sampling.top_p, sampling.min_p)
    return out


def _penalised(logits: Tensor, sampling: SamplingInputs, positions: Tensor) -> Tensor:
    """Apply penalties and bans: [R, V] float32, or the logits if there are none."""
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
    """A contiguous float32 copy of the logits, which may be overwritten."""
    return logits.to(torch.float32, copy=True, memory_format=torch.contiguous_format)


def sample_tokens(
    logits: Tensor | Logits,
    sampling: SamplingInputs,
    positions: Tensor,
    *,
    mask: TokenMask | None = None,
) -> StepOutput:
    """Sample one token for each row of logits, with the columns that any row asks for.

    The step has R rows with W = 1. Rows that failed or whose mask left no token have none. Top
    log-probabilities are as wide as the batch's largest K; what a row did not ask for is undefined.
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
    """Draw a token for each row of logits, for strategies that decide which become output.

    `draws` [R] counts earlier draws of a position, whose random numbers differ; None means 0.
    `confidence` and `entropy` ask for these of `Drawn`. Kernels of a GPU need contiguous
    tensors, so a CPU wants them as well.
    """
    assert positions.is_contiguous() and (draws is None or draws.is_contiguous())
    if logits.is_cuda:
        asked = {"confidence": confidence, "entropy": entropy}
        return draw_fused(logits, sampling, positions, draws, **asked, mask=mask)
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
    entropies = kernels.entropy_of(processed) if entropy else None
    return Drawn(token_ids, failed, columns, probabilities, _conflict(empty, failed), entropies)


def _conflict(empty: Tensor | None, failed: Tensor) -> Tensor | None:
    """Return the rows without a token left whose logits were sound; None without a mask."""
    return None if empty is None else empty & ~failed


def describe(
    logits: Tensor, processed: Tensor, sampling: SamplingInputs, token_ids: Tensor
) -> dict[str, Tensor]:
    """Compute the sampler's output columns that any row asks for, as name → [R, *tail].

    `logits` are the model's, `processed` what `process` made of them; `token_ids` [R] were chosen.
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


def rest_probs(top_logprobs: npt.NDArray[np.float32]) -> npt.NDArray[np.float32]:
    """Return the probability of all tokens but the K whose log-probabilities [N, K] are given."""
    rest = 1 - np.exp(top_logprobs.astype(np.float64)).sum(1)
    clipped: npt.NDArray[np.float32] = rest.clip(0).astype(np.float32)
    return clipped


def score_tokens(
    logits: Tensor, sampling: SamplingInputs, positions: Tensor, token_ids: Tensor
) -> StepOutput:
    """Describe given tokens as `sample_tokens` describes those that it draws, to the bit.

    The step has R rows with W = 1 and columns of answer scope. `token_ids` [R] stand at `positions`
    [R], and the row's history holds all tokens before them if it has penalties.
    """
    return _scored(take_tokens(logits, sampling, positions, token_ids))


def take_tokens(
    logits: Tensor, sampling: SamplingInputs, positions: Tensor, token_ids: Tensor
) -> Drawn:
    """Describe given tokens [R] as `draw_tokens` describes those that it draws, to the bit, but for
    their confidence."""
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
    """`score_tokens` with the fused Triton kernels, on any device."""
    return _scored(_draw_fused(logits, sampling, positions, scored_ids=token_ids))


def _scored(drawn: Drawn) -> StepOutput:
    return StepOutput(
        num_tokens=torch.ones_like(drawn.failed, dtype=torch.int32),
        token_ids=drawn.token_ids.unsqueeze(1),
        failed=drawn.failed,
        columns={_ANSWER + name: values.unsqueeze(1) for name, values in drawn.columns.items()},
    )


def sample_fused(
    logits: Tensor, sampling: SamplingInputs, positions: Tensor, *, mask: TokenMask | None = None
) -> StepOutput:
    """`sample_tokens` with the fused Triton kernels, on any device."""
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
    """`draw_tokens` with the fused Triton kernels, on any device.

    The kernel applies temperature and filters while it reads the logits, once; only penalties, a
    ban or a mask copy them. The host never waits. Tokens differ from `draw_tokens`'s only if two
    scores are so close that rounding decides.
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
    """`draw_fused`, or with `scored_ids` [R] the same of these tokens in place of drawn ones. With
    a `share` the logits are the columns of this rank (`Logits.share_for`)."""
    left, empty = _exclude(logits, sampling, positions, mask)
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
            processed = _scale_and_filter(left, logits, sampling)
            source = torch.where(sampling.processed_logprobs.unsqueeze(1), processed, logits)
        columns[ENTROPY.name] = kernels.entropy_of(source)
    return Drawn(drawn.token_ids, drawn.failed, columns, drawn.confidence, conflict, entropies)


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
