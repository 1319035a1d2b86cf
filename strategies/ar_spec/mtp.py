"""The proposer `mtp`: drafts with the model's own head for multi-token prediction (MTP), which
reads the target's hidden states. Methods without a docstring are those of `Proposer`."""

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

    At position i the head reads the token of position i + 1, and the target's hidden state of
    position i, from which that token was drawn. It predicts the token of position i + 2. Its cache
    entry for this is in KV slot i of a separate cache, which uses the target's block tables.

    So the head reads every token as soon as the token is decided: a prompt's tokens after the
    target's prefill, and the W tokens of a decode step after the target's forward, with or without
    drafts. The head's hidden state after a row's newest token, `SpecRows.hidden`, yields the next
    step's first draft. For later drafts the head reads its own drafts, with its own hidden states
    instead of the target's. Their cache entries are overwritten once the target has verified the
    drafts. So all entries up to the row's newest token are of accepted tokens.

    Drafts are drawn as in `DraftProposer`.

    Args:
        for_rejection: as for `DraftProposer`.
    """

    def __init__(self, runner: ModelRunner, for_rejection: bool) -> None:
        self._runner = runner
        self._for_rejection = for_rejection

    def costs(self, max_rows: int, lengths: Sequence[int]) -> DraftCosts:
        """Return the cost of reading a step's tokens, which every step has, and of drawing its
        drafts. The first draft needs only logits; each further draft needs a forward of one token,
        and logits."""
        widths = [1 + k for k in lengths]
        reading = ForwardSeconds.measure(self._runner, max_rows, widths, ModelRunner.hidden_states)
        drawing = ForwardSeconds.measure(self._runner, max_rows, (1,))

        def seconds(num_rows: int, k: int) -> float:
            # `drawing` is a forward and logits. The first draft takes no forward.
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
        # The token after a chunk's last token is not in the chunk.
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
        # The runner's result is valid only until its next forward, so the rows keep a copy.
        state.joining_hidden = self._runner.prefill_states(PrefillInputs(shifted, joining)).clone()

    def propose(self, state: SpecStepInputs, k: int) -> Drafts:
        def read(token_ids: Tensor, positions: Tensor, before: Tensor, hidden: Tensor) -> Tensor:
            rows = replace(state.newest, positions=before)
            return self._runner.hidden_states(_of_head(rows, token_ids, hidden))

        return draft_one_by_one(
            state, k, self._runner, state.rows.hidden, read, self._for_rejection
        )

    def verified(self, state: SpecStepInputs, output: ModelOutput, step: StepOutput) -> None:
        assert output.hidden is not None
        rows = state.model_inputs
        inputs = _of_head(rows, step.token_ids.flatten(), output.hidden)
        state.step_hidden = self._runner.hidden_states(inputs)


def _of_head(inputs: ModelInputs, token_ids: Tensor, hidden: Tensor) -> ModelInputs:
    """Make inputs of the head, which has no recurrent states, for the rows and positions of the
    target's inputs.

    Args:
        token_ids: [T] int64, the token after each position.
        hidden: [T, hidden_size], the target's hidden states of the positions.
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
