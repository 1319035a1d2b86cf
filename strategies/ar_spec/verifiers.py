"""From the logits at a row's newest token and its k drafts to the tokens that the row commits."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import torch
from torch import Tensor

from batchgen.engine.execution.model_runner import ModelOutput
from batchgen.engine.outputs import StepOutput
from batchgen.engine.sampling.sampler import describe, process, sample
from batchgen.kernels.sampling.token_mask import TokenMask
from batchgen.kernels.speculation.drafts import accept_drafts
from batchgen.kernels.speculation.rejection import verify
from batchgen.strategies.ar_spec.step_inputs import Drafts, SpecStepInputs

Verifier = Callable[[SpecStepInputs, ModelOutput, Drafts, TokenMask | None], StepOutput]
"""The step of B rows of up to k + 1 tokens: accepted drafts and one token more. The mask is of the
B · (k + 1) logits rows."""


def pathwise(
    state: SpecStepInputs, output: ModelOutput, drafts: Drafts, mask: TokenMask | None = None
) -> StepOutput:
    """Sample every position as without drafts; keep what follows drafts that were sampled too.

    So each token is the one that decoding without drafts yields, at any temperature and with every
    option. A draft of a point mass is accepted as often as by rejection.
    """
    width = 1 + drafts.token_ids.shape[1]
    step = sample(output.logits, state.repeated(width), output.positions + 1, mask=mask)
    return keep_held(step, drafts)


def keep_held(step: StepOutput, drafts: Drafts) -> StepOutput:
    """Of the B · (k + 1) tokens that were sampled after each run of drafts, those after runs that
    hold: the drafts that were sampled too, and one token more.

    A row fails after the tokens before its first broken logits, as it would without drafts; or its
    constraint conflicts there.
    """
    num_tokens, failed = accept_drafts(
        step.token_ids, step.num_tokens, drafts.token_ids, drafts.counts
    )
    width = 1 + drafts.token_ids.shape[1]
    columns = {
        name: values.view(-1, width, *values.shape[2:]) for name, values in step.columns.items()
    }
    conflicts = None
    if step.conflicts is not None:
        place = num_tokens.clamp(max=width - 1).long().unsqueeze(1)
        conflicts = failed & step.conflicts.view(-1, width).gather(1, place).squeeze(1)
        failed &= ~conflicts
    return StepOutput(
        num_tokens, step.token_ids.view(-1, width), failed, columns, conflicts=conflicts
    )


def rejection(
    state: SpecStepInputs, output: ModelOutput, drafts: Drafts, mask: TokenMask | None = None
) -> StepOutput:
    """Accept each draft with probability min(1, p / q) (Leviathan et al. 2023, Chen et al. 2023).

    The tokens have the law of decoding without drafts, but are others.
    """
    k = drafts.token_ids.shape[1]
    sampling, rows = state.repeated(1 + k), state.sampling
    processed = process(output.logits, sampling, output.positions + 1, mask=mask)
    verified = verify(
        processed,
        drafts.token_ids,
        drafts.counts,
        drafts.probs,
        rows.seeds,
        state.newest.positions + 1,
        rows.greedy,
    )
    step = StepOutput(verified.num_tokens, verified.token_ids, verified.failed)
    if mask is not None:
        step = _up_to_conflicts(step, output, processed, mask, drafts)
    columns = describe(output.logits, processed, sampling, step.token_ids.flatten())
    folded = {name: values.unflatten(0, (-1, 1 + k)) for name, values in columns.items()}
    return replace(step, columns=folded)


def _up_to_conflicts(
    step: StepOutput, output: ModelOutput, processed: Tensor, mask: TokenMask, drafts: Drafts
) -> StepOutput:
    """With the tokens before the logits at which rows cannot go on, and which of those rows
    conflict: where the model gave numbers and all tokens are excluded."""
    k = drafts.token_ids.shape[1]
    most, failed = processed.amax(-1), step.failed
    # Such a row accepted every draft before the first logits that leave nothing to draw.
    place = (~most.isfinite()).view(-1, 1 + k).int().argmax(1)
    token_ids = step.token_ids.clone()
    token_ids[:, :k] = torch.where(failed.unsqueeze(1), drafts.token_ids, token_ids[:, :k])
    excluded = output.logits.amax(-1).isfinite() & (mask.lines >= 0) & most.isneginf()
    conflicts = failed & excluded.view(-1, 1 + k).gather(1, place.unsqueeze(1)).squeeze(1)
    return replace(
        step,
        num_tokens=torch.where(failed, place.int(), step.num_tokens),
        token_ids=token_ids,
        failed=failed & ~conflicts,
        conflicts=conflicts,
    )


VERIFIERS: dict[str, Verifier] = {"pathwise": pathwise, "rejection": rejection}
