"""The proposer `mtp`: drafts by a model's own head for multi-token prediction, which reads the
target's hidden states."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import numpy as np
import torch
from torch import Tensor

from batchgen.engine.device.transfer import upload
from batchgen.engine.execution.model_inputs import ModelInputs
from batchgen.engine.execution.model_runner import ModelOutput, ModelRunner, PrefillInputs
from batchgen.engine.interface.outputs import StepOutput
from batchgen.engine.rows.scheduled_batch import PrefillBatch
from batchgen.strategies.ar_spec.controller import DraftCosts, ForwardSeconds
from batchgen.strategies.ar_spec.proposers import Proposer, draft_one_by_one
from batchgen.strategies.ar_spec.step_inputs import Drafts, SpecStepInputs


class MTPProposer(Proposer):
    """Drafts with the target's head for multi-token prediction (Gloeckle et al. 2024; DeepSeek-V3
    2024).

    At position i the head reads the token of position i + 1 and the target's hidden state of
    position i, which that token was drawn from, and predicts the token of position i + 2. What its
    layers keep of this stands in KV slot i of a cache with the target's block tables.

    So it reads every token as soon as the token is decided: prompts behind the target's prefill,
    and the W tokens of a decode step behind the target's forward, whether the step had drafts or
    not. The hidden state that this leaves behind each row's newest token, `SpecRows.hidden`, is
    what the next step's first draft is drawn from. For later drafts the head reads its own drafts,
    with its own hidden states in place of the target's. What it keeps of them is written anew when
    the target has verified them, so nothing that it keeps is ever of a token that was not accepted,
    but behind the row's newest token.

    Drafts are drawn as `DraftProposer` says.

    Args:
        own_law: as for `DraftProposer`.
    """

    def __init__(self, runner: ModelRunner, own_law: bool) -> None:
        self._runner = runner
        self._own_law = own_law

    def costs(self, max_rows: int, lengths: Sequence[int]) -> DraftCosts:
        """What reading a step's tokens takes, which is never spared, and drawing each draft. The
        first draft needs logits alone; each further one a forward of one token and its logits."""
        widths = [1 + k for k in lengths]
        reading = ForwardSeconds.measure(self._runner, max_rows, widths, ModelRunner.hidden_states)
        drawing = ForwardSeconds.measure(self._runner, max_rows, (1,))

        def seconds(num_rows: int, k: int) -> float:
            drafts = k * drawing(num_rows) - reading(num_rows) if k else 0.0
            return reading(num_rows * (1 + k)) + max(drafts, 0.0)

        return seconds

    def prefilled(
        self,
        state: SpecStepInputs,
        batch: PrefillBatch,
        inputs: ModelInputs,
        hidden: Tensor | None,
        newest: Tensor,
    ) -> None:
        assert hidden is not None and len(inputs.query_lens) == len(batch.seqs)
        token_ids = inputs.input_ids.roll(-1)
        # Each row's last token in the chunk comes before one that is not in the chunk.
        lasts = inputs.query_lens.cumsum() - 1
        joining = np.array(batch.completing, np.int64)
        cut = np.setdiff1d(np.arange(len(lasts)), joining)
        device = token_ids.device
        if len(joining):
            token_ids[upload(lasts[joining], torch.int64, device)] = newest
        if len(cut):
            ends = inputs.context_lens[cut].tolist()
            after = [batch.seqs[i].token_ids[end] for i, end in zip(cut, ends, strict=True)]
            token_ids[upload(lasts[cut], torch.int64, device)] = upload(after, torch.int64, device)
        shifted = _of_head(inputs, token_ids, hidden)
        # The result is valid until the next forward only, and the rows keep it.
        state.joining_hidden = self._runner.prefill_states(PrefillInputs(shifted, joining)).clone()

    def propose(self, state: SpecStepInputs, k: int) -> Drafts:
        def read(token_ids: Tensor, positions: Tensor, before: Tensor, hidden: Tensor) -> Tensor:
            rows = replace(state.newest, positions=before)
            return self._runner.hidden_states(_of_head(rows, token_ids, hidden))

        return draft_one_by_one(state, k, self._runner, state.rows.hidden, read, self._own_law)

    def verified(self, state: SpecStepInputs, output: ModelOutput, step: StepOutput) -> None:
        assert output.hidden is not None
        rows = state.model_inputs
        inputs = _of_head(rows, step.token_ids.flatten(), output.hidden)
        state.step_hidden = self._runner.hidden_states(inputs)


def _of_head(inputs: ModelInputs, token_ids: Tensor, hidden: Tensor) -> ModelInputs:
    """Make inputs of the head, which keeps no states, of the rows and positions of the target.

    Args:
        token_ids: [T] int64, the tokens that follow them.
        hidden: [T, hidden_size], the hidden states that the following tokens were drawn from.
    """
    return replace(
        inputs,
        input_ids=token_ids,
        hidden=hidden,
        state_slots=None,
        snapshots=None,
        replayed=None,
        replayed_before=None,
    )
