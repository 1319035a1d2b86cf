"""From the logits at a row's newest token and its k drafts to the tokens that the row commits."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import torch

from batchgen.engine.model_runner import ModelOutput
from batchgen.engine.outputs import StepOutput
from batchgen.engine.sampler import describe, process, sample
from batchgen.kernels.rejection import verify
from batchgen.strategies.ar_spec.step_inputs import Drafts, SpecStepInputs

Verifier = Callable[[SpecStepInputs, ModelOutput, Drafts], StepOutput]
"""The step of B rows of up to k + 1 tokens: accepted drafts and one token more."""


def pathwise(state: SpecStepInputs, output: ModelOutput, drafts: Drafts) -> StepOutput:
    """Sample every position as without drafts; keep what follows drafts that were sampled too.

    So each token is the one that decoding without drafts yields, at any temperature and with every
    option. A draft of a point mass is accepted as often as by rejection.
    """
    k = drafts.token_ids.shape[1]
    sampling = state.repeated(1 + k)
    step = sample(output.logits, sampling, output.positions + 1).fold(1 + k)
    offered = torch.arange(k, device=drafts.counts.device) < drafts.counts.unsqueeze(1)
    held = (step.token_ids[:, :k] == drafts.token_ids) & offered
    accepted = held.cumprod(1, dtype=torch.int32).sum(1, dtype=torch.int32)
    # Without drafts the row would fail after the tokens before its first broken logits.
    failed = accepted + 1 > step.num_tokens
    num_tokens = (accepted + 1).minimum(step.num_tokens)
    return replace(step, num_tokens=num_tokens, failed=failed)


def rejection(state: SpecStepInputs, output: ModelOutput, drafts: Drafts) -> StepOutput:
    """Accept each draft with probability min(1, p / q) (Leviathan et al. 2023, Chen et al. 2023).

    The tokens have the law of decoding without drafts, but are others.
    """
    k = drafts.token_ids.shape[1]
    sampling, rows = state.repeated(1 + k), state.sampling
    processed = process(output.logits, sampling, output.positions + 1)
    verified = verify(
        processed,
        drafts.token_ids,
        drafts.counts,
        drafts.probs,
        rows.seeds,
        state.newest.positions + 1,
        rows.greedy,
    )
    token_ids = verified.token_ids
    columns = describe(output.logits, processed, sampling, token_ids.flatten())
    step = StepOutput(verified.num_tokens, token_ids, verified.failed)
    folded = {name: values.unflatten(0, (-1, 1 + k)) for name, values in columns.items()}
    return replace(step, columns=folded)


VERIFIERS: dict[str, Verifier] = {"pathwise": pathwise, "rejection": rejection}
