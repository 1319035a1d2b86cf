"""The proposers, which draft the tokens that may come next. They keep no state of the rows: that is
all in `SpecStepInputs`."""

from __future__ import annotations

from typing import Protocol

import numpy as np
import torch
from torch import Tensor

from batchgen.engine.execution.model_inputs import ModelInputs
from batchgen.engine.execution.model_runner import ModelRunner, PrefillInputs
from batchgen.engine.sampling.sampler import process, sample
from batchgen.engine.scheduling.scheduled_batch import PrefillBatch
from batchgen.kernels.speculation.rejection import draw_drafts
from batchgen.strategies.ar_spec.step_inputs import Drafts, SpecStepInputs

CATCH_UP_WIDTH = 8
"""How many tokens of each row a draft model reads in one forward to catch up, when steps went
without it."""


class Proposer(Protocol):
    """Drafts the tokens that may follow the newest token of each row.

    Attributes:
        widths: the numbers of tokens of a row in one forward of the proposer's own model; empty if
            it has no model.
        needs_hidden: whether it drafts from the target's hidden states, as heads for multi-token
            prediction do.
    """

    widths: tuple[int, ...]
    needs_hidden: bool

    def prefilled(
        self, state: SpecStepInputs, batch: PrefillBatch, inputs: ModelInputs, hidden: Tensor | None
    ) -> None:
        """Take note of prompt tokens that the target has read.

        Args:
            state: the state of the decoding rows, which these rows have not joined yet.
            batch: the rows whose prompts these are.
            inputs: the T tokens, a chunk of each row.
            hidden: [T, hidden_size], the target's hidden states of the tokens; None unless
                `needs_hidden`.
        """

    def propose(self, state: SpecStepInputs, k: int) -> Drafts:
        """Draft at most k tokens for each row, where k is at least 1.

        If the proposer needs hidden states, `state.rows.hidden` has those from which the newest
        tokens were drawn.
        """

    def skipped(self, state: SpecStepInputs) -> None:
        """Take note of a step that is run without drafts."""


class NgramProposer:
    """Drafts the tokens that followed the row's last tokens at an earlier occurrence, in the row or
    in others (prompt lookup, Saxena 2023)."""

    widths: tuple[int, ...] = ()
    needs_hidden = False

    def prefilled(
        self, state: SpecStepInputs, batch: PrefillBatch, inputs: ModelInputs, hidden: Tensor | None
    ) -> None:
        """Does nothing, because rows put their prompts into the token store when they join."""

    def propose(self, state: SpecStepInputs, k: int) -> Drafts:
        return Drafts(*state.store.propose(state.rows.entries_there, k))

    def skipped(self, state: SpecStepInputs) -> None:
        """Does nothing, because every step adds its tokens to the index, with drafts or without."""


class DraftProposer:
    """Drafts with a smaller model of the same vocabulary. Its KV cache has blocks of the same
    numbers, so the rows' block tables serve both models.

    The drafts are drawn by the ordinary sampler with the row's own options and random numbers. So a
    draft is the token that the row would yield if the target's distribution were the draft model's.
    As both tokens come from the same Gumbel noise (a coupling by common random numbers), they are
    often equal.

    Args:
        runner: the runner of the draft model.
        own_law: draw with random numbers that nothing else uses, and return the distribution of
            each draft, as verification by rejection needs.
    """

    widths: tuple[int, ...] = (1, 2, CATCH_UP_WIDTH)
    needs_hidden = False

    def __init__(self, runner: ModelRunner, own_law: bool) -> None:
        self._runner = runner
        self._own_law = own_law

    def prefilled(
        self, state: SpecStepInputs, batch: PrefillBatch, inputs: ModelInputs, hidden: Tensor | None
    ) -> None:
        self._runner.prefill(PrefillInputs(inputs, np.empty(0, np.int64)))

    def skipped(self, state: SpecStepInputs) -> None:
        state.draft_lag += 1

    def propose(self, state: SpecStepInputs, k: int) -> Drafts:
        while state.draft_lag > 2:
            self._read(state, state.draft_lag, CATCH_UP_WIDTH)
            state.draft_lag = max(2, state.draft_lag - CATCH_UP_WIDTH)
        # It reads two tokens, because the last draft of a step is not read by the model that
        # drafted it. If all drafts held, that one comes just before the newest token.
        hidden = self._read(state, 2, 2).unflatten(0, (-1, 2))[:, 1]
        state.draft_lag = 2
        positions = state.positions_ahead(1 + k).T.contiguous()
        drafts: list[Tensor] = []
        laws: list[Tensor] = []
        for j in range(k):
            token_ids = self._draw(state, hidden, positions[j], laws)
            drafts.append(token_ids)
            if j + 1 < k:
                # Penalties must count this draft when the later ones are drawn, as they do when the
                # drafts are verified.
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
        """Draw the next draft of each row.

        Args:
            state: the state of the rows.
            hidden: [B, hidden_size], the draft model's hidden states of the tokens before.
            positions: [B] int64, the positions of those tokens.
            laws: with `own_law`, gets the distribution [B, V] that the drafts were drawn from.

        Returns:
            [B] int64, the token ids.
        """
        logits, sampling = self._runner.compute_logits(hidden), state.sampling
        if not self._own_law:
            return sample(logits, sampling, positions + 1).token_ids[:, 0]
        processed = process(logits, sampling, positions + 1)
        token_ids, law = draw_drafts(processed, sampling.seeds, positions + 1, sampling.greedy)
        laws.append(law)
        return token_ids

    def _read(self, state: SpecStepInputs, back: int, width: int) -> Tensor:
        """Let the draft model read `width` known tokens of each row, of which the first is the
        `back`-th newest. If these are more than there are, the newest is read several times.

        Returns:
            [B · width, hidden_size], the draft model's hidden states of the tokens.
        """
        newest = state.newest.positions.unsqueeze(1)
        offsets = torch.arange(1 - back, 1 - back + width, device=newest.device).clamp(max=0)
        positions = (newest + offsets).clamp(min=0)
        store = state.store.tokens
        token_ids = store[state.rows.entries_there.unsqueeze(1), positions].long()
        inputs = _with_tokens(state.newest, token_ids.flatten(), positions.flatten(), width)
        return self._runner.hidden_states(inputs)


def _with_tokens(
    rows: ModelInputs, input_ids: Tensor, positions: Tensor, width: int
) -> ModelInputs:
    """The same rows as model inputs of `width` tokens each: input_ids and positions are
    [B · width] int64."""
    return ModelInputs(
        input_ids,
        positions,
        rows.block_tables,
        np.full_like(rows.query_lens, width),
        rows.context_lens,
    )
