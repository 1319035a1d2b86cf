"""The proposers, which draft the tokens that may come next. They keep no state of the rows: that is
all in `SpecStepInputs`."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np
import torch
from torch import Tensor

from batchgen.engine.execution.model_inputs import ModelInputs
from batchgen.engine.execution.model_runner import ModelOutput, ModelRunner, PrefillInputs
from batchgen.engine.interface.outputs import StepOutput
from batchgen.engine.rows.scheduled_batch import PrefillBatch
from batchgen.engine.sampling.processed_logits import process
from batchgen.engine.sampling.sampler import sample_tokens
from batchgen.kernels.speculation.rejection import draw_drafts
from batchgen.strategies.ar_spec.controller import DraftCosts, ForwardSeconds
from batchgen.strategies.ar_spec.step_inputs import Drafts, SpecStepInputs

CATCH_UP_WIDTH = 8
"""How many tokens of each row a draft model reads in one forward to catch up, when steps went
without it."""


class Proposer:
    """Drafts the tokens that may follow the newest token of each row. By default it takes note of
    nothing: rows put their prompts into the token store when they join, and every step adds its
    tokens, with drafts or without."""

    def costs(self, max_rows: int, lengths: Sequence[int]) -> DraftCosts:
        """Measure what the proposer's own model takes; by default it has none."""
        return lambda num_rows, k: 0.0

    def prefilled(
        self,
        state: SpecStepInputs,
        batch: PrefillBatch,
        inputs: ModelInputs,
        hidden: Tensor | None,
        newest: Tensor,
    ) -> None:
        """Take note of prompt tokens that the target has read.

        Args:
            hidden: [T, hidden_size], the target's hidden states of the tokens; None unless the
                strategy `needs_hidden`.
            newest: [J] int64, the token behind the chunk, for the rows that join next.
        """

    def propose(self, state: SpecStepInputs, k: int) -> Drafts:
        """Draft at most k tokens for each row, where k is at least 1."""
        raise NotImplementedError

    def skipped(self, state: SpecStepInputs) -> None:
        """Take note of a step that is run without drafts."""

    def overruled(self, state: SpecStepInputs, k: int) -> None:
        """Take note that other tokens take the place of some of the k drafts of each row."""

    def verified(self, state: SpecStepInputs, output: ModelOutput, step: StepOutput) -> None:
        """Take note of the tokens that a step decided, with drafts or without, before the rows move
        on by them."""


class NgramProposer(Proposer):
    """Drafts the tokens that followed the row's last tokens at an earlier occurrence, in the row or
    in others (prompt lookup, Saxena 2023). Drafts end before an image."""

    def propose(self, state: SpecStepInputs, k: int) -> Drafts:
        token_ids, counts = state.store.propose(state.rows.entries_there, k)
        if state.strange_from is not None:
            known = token_ids < state.strange_from
            counts = counts.minimum(known.int().cumprod(1).sum(1, dtype=torch.int32))
            token_ids = torch.where(known, token_ids, 0)
        return Drafts(token_ids, counts)


class DraftProposer(Proposer):
    """Drafts with a smaller model of the same vocabulary. Its KV cache has blocks of the same
    numbers, so the rows' block tables serve both models. It reads text only: of an image it sees
    the tokens that stand for it.

    The drafts are drawn by the ordinary sampler with the row's own options and random numbers. So a
    draft is the token that the row would yield if the target's distribution were the draft model's.
    As both tokens come from the same Gumbel noise (a coupling by common random numbers), they are
    often equal.

    Args:
        own_law: draw with random numbers that nothing else uses, and return the distribution of
            each draft, as verification by rejection needs.
    """

    widths: tuple[int, ...] = (1, 2, CATCH_UP_WIDTH)

    def __init__(self, runner: ModelRunner, own_law: bool) -> None:
        self._runner = runner
        self._own_law = own_law

    def costs(self, max_rows: int, lengths: Sequence[int]) -> DraftCosts:
        of_forward = ForwardSeconds.measure(self._runner, max_rows, (1,))
        return lambda num_rows, k: k * of_forward(num_rows)

    def prefilled(
        self,
        state: SpecStepInputs,
        batch: PrefillBatch,
        inputs: ModelInputs,
        hidden: Tensor | None,
        newest: Tensor,
    ) -> None:
        self._runner.prefill(PrefillInputs(inputs, np.empty(0, np.int64)))

    def skipped(self, state: SpecStepInputs) -> None:
        state.draft_lag += 1

    def overruled(self, state: SpecStepInputs, k: int) -> None:
        """The model's cache has its own drafts in the KV slots of the other tokens."""
        state.draft_lag = 1 + k

    def propose(self, state: SpecStepInputs, k: int) -> Drafts:
        while state.draft_lag > 2:
            self._read(state, state.draft_lag, CATCH_UP_WIDTH)
            state.draft_lag = max(2, state.draft_lag - CATCH_UP_WIDTH)
        # It reads two tokens, because the last draft of a step is not read by the model that
        # drafted it. If all drafts held, that one comes just before the newest token.
        hidden = self._read(state, 2, 2).unflatten(0, (-1, 2))[:, 1]
        state.draft_lag = 2

        def read(token_ids: Tensor, positions: Tensor, before: Tensor, hidden: Tensor) -> Tensor:
            return self._runner.hidden_states(_with_tokens(state.newest, token_ids, positions, 1))

        return draft_one_by_one(state, k, self._runner, hidden, read, self._own_law)

    def _read(self, state: SpecStepInputs, back: int, width: int) -> Tensor:
        """Let the draft model read `width` known tokens of each row, of which the first is the
        `back`-th newest. If these are more than there are, the newest is read several times.
        Returns [B · width, hidden_size], the draft model's hidden states of the tokens."""
        newest = state.newest.positions.unsqueeze(1)
        offsets = torch.arange(1 - back, 1 - back + width, device=newest.device).clamp(max=0)
        positions = (newest + offsets).clamp(min=0)
        store = state.store.tokens
        token_ids = store[state.rows.entries_there.unsqueeze(1), positions].long()
        inputs = _with_tokens(state.newest, token_ids.flatten(), positions.flatten(), width)
        return self._runner.hidden_states(inputs)


def draft_one_by_one(
    state: SpecStepInputs,
    k: int,
    runner: ModelRunner,
    hidden: Tensor,
    read: Callable[[Tensor, Tensor, Tensor, Tensor], Tensor],
    own_law: bool,
) -> Drafts:
    """Draft k tokens for each row, each from a hidden state of the model that drafts.

    Args:
        k: the number of drafts, at least 1.
        hidden: [B, hidden_size], its hidden states from which the first drafts are drawn.
        read: `read(token_ids, positions, before, hidden)` lets the model read a draft of each row,
            at these positions, which was drawn from `hidden`, the hidden states of the positions
            before; all but hidden are [B]. It returns the hidden states for the next draft.
        own_law: as for `DraftProposer`.
    """
    sampling, drafts, laws = state.sampling, [], []
    positions = state.positions_ahead(1 + k).T.contiguous()
    for j in range(k):
        logits, drawn = runner.divided_logits(hidden), positions[j] + 1
        if own_law:
            processed = process(logits.whole(), sampling, drawn)
            token_ids, law = draw_drafts(processed, sampling.seeds, drawn, sampling.greedy)
            laws.append(law)
        else:
            token_ids = sample_tokens(logits, sampling, drawn).token_ids[:, 0]
        drafts.append(token_ids)
        if j + 1 < k:
            # Penalties must count this draft when the later ones are drawn, as they do when the
            # drafts are verified.
            if sampling.any_penalties:
                sampling.append(token_ids.unsqueeze(1), torch.ones_like(token_ids), drawn)
            hidden = read(token_ids, positions[j + 1], positions[j], hidden)
    counts = torch.full_like(token_ids, k, dtype=torch.int32)
    return Drafts(torch.stack(drafts, 1), counts, torch.stack(laws, 1) if own_law else None)


def _with_tokens(
    rows: ModelInputs, input_ids: Tensor, positions: Tensor, width: int
) -> ModelInputs:
    """Make model inputs of `width` tokens for each of the B rows; input_ids and positions are
    [B · width] int64."""
    return ModelInputs(
        input_ids,
        positions,
        rows.block_tables,
        np.full_like(rows.query_lens, width),
        rows.context_lens,
        window_tables=rows.window_tables,
    )
