"""Where drafts come from. Proposers hold no state: it is all in StepInputs."""

from __future__ import annotations

from typing import Protocol

import numpy as np
import torch
from torch import Tensor

from batchgen.engine.execution.model_inputs import ModelInputs
from batchgen.engine.execution.model_runner import ModelRunner
from batchgen.engine.sampling.sampler import process, sample
from batchgen.engine.scheduling.scheduled_batch import PrefillBatch
from batchgen.kernels.speculation.rejection import draw_drafts
from batchgen.strategies.ar_spec.step_inputs import Drafts, SpecStepInputs

CATCH_UP_WIDTH = 8
"""Tokens of a row in one forward of a draft model that fell behind."""


class Proposer(Protocol):
    """Attributes:
    widths: tokens of a row in one forward of its own model; none if it has none.
    needs_hidden: it drafts from the model's hidden states, as heads for multi-token prediction do.
    """

    widths: tuple[int, ...]
    needs_hidden: bool

    def prefilled(
        self, state: SpecStepInputs, batch: PrefillBatch, inputs: ModelInputs, hidden: Tensor | None
    ) -> None:
        """The model has read these tokens of prompts, chunks of the batch's rows.

        Args:
            hidden: [T, hidden_size] of them, if needed.
        """

    def propose(self, state: SpecStepInputs, k: int) -> Drafts:
        """The k tokens that may follow each row's newest, or fewer; k is at least 1.

        Where hidden states are needed, `state.rows.hidden` has those that the newest tokens were
        drawn from.
        """

    def skipped(self, state: SpecStepInputs) -> None:
        """A step goes without drafts."""


class NgramProposer:
    """What followed the row's last tokens where they stood before (Saxena 2023)."""

    widths: tuple[int, ...] = ()
    needs_hidden = False

    def prefilled(
        self, state: SpecStepInputs, batch: PrefillBatch, inputs: ModelInputs, hidden: Tensor | None
    ) -> None:
        """The store gets the prompts."""

    def propose(self, state: SpecStepInputs, k: int) -> Drafts:
        return Drafts(*state.store.propose(state.rows.slots_there, k))

    def skipped(self, state: SpecStepInputs) -> None:
        """The index grows with every token anyway."""


class DraftProposer:
    """A smaller model of the same vocabulary, whose KV stands in the same blocks.

    Its tokens are drawn by the ordinary sampler with each row's own options and random numbers: so
    the draft is what the row would yield if the model agreed with the draft model, which makes them
    agree as often as they can (the coupling of Gumbel noise, as in common random numbers).

    Args:
        runner: of the draft model.
        own_law: draw from the draft model's law with random numbers of their own, and return that
            law, as verification by rejection needs.
    """

    widths: tuple[int, ...] = (1, 2, CATCH_UP_WIDTH)
    needs_hidden = False

    def __init__(self, runner: ModelRunner, own_law: bool) -> None:
        self._runner = runner
        self._own_law = own_law

    def prefilled(
        self, state: SpecStepInputs, batch: PrefillBatch, inputs: ModelInputs, hidden: Tensor | None
    ) -> None:
        self._runner.prefill(inputs, np.empty(0, np.int64))

    def skipped(self, state: SpecStepInputs) -> None:
        state.draft_lag += 1

    def propose(self, state: SpecStepInputs, k: int) -> Drafts:
        while state.draft_lag > 2:
            self._read(state, state.draft_lag, CATCH_UP_WIDTH)
            state.draft_lag = max(2, state.draft_lag - CATCH_UP_WIDTH)
        # Two tokens: if all drafts of the last step held, the last of them was never read.
        hidden = self._read(state, 2, 2).unflatten(0, (-1, 2))[:, 1]
        state.draft_lag = 2
        positions = state.positions_ahead(1 + k).T.contiguous()
        drafts: list[Tensor] = []
        laws: list[Tensor] = []
        for j in range(k):
            token_ids = self._draw(state, hidden, positions[j], laws)
            drafts.append(token_ids)
            if j + 1 < k:
                # Later drafts have this one in their history, as the model will have.
                if state.sampling.any_penalties:
                    ones = torch.ones_like(token_ids)
                    state.sampling.append(token_ids.unsqueeze(1), ones, positions[j] + 1)
                hidden = self._runner.hidden_states(
                    _with_tokens(state.newest, token_ids, positions[j + 1], 1)
                )
        counts = torch.full_like(token_ids, k, dtype=torch.int32)
        probs = torch.stack(laws, 1) if self._own_law else None
        return Drafts(torch.stack(drafts, 1), counts, probs)

    def _draw(
        self, state: SpecStepInputs, hidden: Tensor, positions: Tensor, laws: list[Tensor]
    ) -> Tensor:
        """[B] tokens that follow the positions [B]."""
        logits, sampling = self._runner.compute_logits(hidden), state.sampling
        if not self._own_law:
            return sample(logits, sampling, positions + 1).token_ids[:, 0]
        processed = process(logits, sampling, positions + 1)
        token_ids, law = draw_drafts(processed, sampling.seeds, positions + 1, sampling.greedy)
        laws.append(law)
        return token_ids

    def _read(self, state: SpecStepInputs, back: int, width: int) -> Tensor:
        """[B · width, hidden_size] of known tokens from the `back` newest on, none twice but the
        newest; their KV is written."""
        newest = state.newest.positions.unsqueeze(1)
        offsets = torch.arange(1 - back, 1 - back + width, device=newest.device).clamp(max=0)
        positions = (newest + offsets).clamp(min=0)
        store = state.store.tokens
        token_ids = store[state.rows.slots_there.unsqueeze(1), positions].long()
        inputs = _with_tokens(state.newest, token_ids.flatten(), positions.flatten(), width)
        return self._runner.hidden_states(inputs)


def _with_tokens(
    rows: ModelInputs, input_ids: Tensor, positions: Tensor, width: int
) -> ModelInputs:
    """The rows with `width` tokens each."""
    return ModelInputs(
        input_ids,
        positions,
        rows.block_tables,
        np.full_like(rows.query_lens, width),
        rows.context_lens,
    )
