"""The verifiers of speculative decoding, which decide which drafts are accepted.

A verifier turns the logits at a row's newest token and at its k drafts into the tokens of the step.
Verifiers keep no state. A draft *holds* if the verifier accepts it and all drafts before it in the
same row and step.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import torch
from torch import Tensor

from batchgen.engine.execution.model_runner import ModelOutput
from batchgen.engine.interface.outputs import StepOutput
from batchgen.engine.sampling.processed_logits import process
from batchgen.engine.sampling.sampler import describe, sample_tokens
from batchgen.kernels.sampling.token_mask import TokenMask
from batchgen.kernels.speculation.drafts import accept_drafts
from batchgen.kernels.speculation.rejection import verify
from batchgen.strategies.ar_spec.step_inputs import Drafts, SpecStepInputs

Verifier = Callable[[SpecStepInputs, ModelOutput, Drafts, TokenMask | None], StepOutput]
"""Arguments: the state of B rows, the output of their forward, their drafts, and the mask of the B
· (k + 1) rows of logits (None without constraints). Returns the step, in which a row has at most k
+ 1 tokens: its accepted drafts and one more token."""


def pathwise(
    state: SpecStepInputs, output: ModelOutput, drafts: Drafts, mask: TokenMask | None = None
) -> StepOutput:
    """Sample every position as decoding without drafts would, and keep the tokens up to the first
    one that differs from its draft.

    So each token equals the one that decoding without drafts yields, at any temperature and with
    every option. Drafts that were not drawn from a distribution, such as n-grams, are accepted as
    often as by rejection sampling.
    """
    width = 1 + drafts.token_ids.shape[1]
    step = sample_tokens(output.divided, state.repeated(width), output.positions + 1, mask=mask)
    return keep_held(step, drafts)


def keep_held(step: StepOutput, drafts: Drafts) -> StepOutput:
    """Keep, of the tokens sampled at each position, those that follow only correct drafts: the
    drafts that held, and one more token per row.

    A row keeps no token from its first position with broken logits on. There it fails or conflicts
    with its constraint, as it would without drafts. Returns a step of B rows with W = k + 1.

    Args:
        step: a step of B · (k + 1) rows with one token each: for each row of the batch, the token
            sampled after none of its drafts, after the first one, and so on.
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
        index = num_tokens.clamp(max=width - 1).long().unsqueeze(1)
        conflicts = failed & step.conflicts.view(-1, width).gather(1, index).squeeze(1)
        failed &= ~conflicts
    return StepOutput(
        num_tokens, step.token_ids.view(-1, width), failed, columns, conflicts=conflicts
    )


def rejection(
    state: SpecStepInputs, output: ModelOutput, drafts: Drafts, mask: TokenMask | None = None
) -> StepOutput:
    """Accept each draft with probability min(1, p / q), where p is its probability under the target
    and q under the draft model (Leviathan et al. 2023, Chen et al. 2023). The tokens have the same
    distribution as without drafts, but are not the same tokens."""
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
    """Give failed rows the drafts that they accepted before, and distinguish failures from
    conflicts. A row has a conflict if its logits are finite, but its mask and options left no
    token.

    Args:
        processed: [B · (k + 1), V], the logits after all options and the mask.
    """
    k = drafts.token_ids.shape[1]
    longest, failed = processed.amax(-1), step.failed
    # A failed row accepted all drafts before its first position without a token to draw.
    index = (~longest.isfinite()).view(-1, 1 + k).int().argmax(1)
    token_ids = step.token_ids.clone()
    token_ids[:, :k] = torch.where(failed.unsqueeze(1), drafts.token_ids, token_ids[:, :k])
    excluded = output.logits.amax(-1).isfinite() & (mask.lines >= 0) & longest.isneginf()
    conflicts = failed & excluded.view(-1, 1 + k).gather(1, index.unsqueeze(1)).squeeze(1)
    return replace(
        step,
        num_tokens=torch.where(failed, index.int(), step.num_tokens),
        token_ids=token_ids,
        failed=failed & ~conflicts,
        conflicts=conflicts,
    )


VERIFIERS: dict[str, Verifier] = {"pathwise": pathwise, "rejection": rejection}
"""Maps the values of the option `verifier` to verifiers."""
