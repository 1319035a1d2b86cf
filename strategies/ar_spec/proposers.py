"""The proposers of speculative decoding, which draft the tokens that may come next. They keep no
state of the rows; `SpecStepInputs` holds it."""

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
"""How many tokens per row a draft model reads in one forward to catch up after steps without it."""


class Proposer:
    """Drafts the tokens that may follow the newest token of each row.

    The methods `prefilled`, `skipped`, `overruled` and `verified` tell a proposer what happened. By
    default they do nothing, because the token store already contains prompts and all new tokens.
    """

    def costs(self, max_rows: int, lengths: Sequence[int]) -> DraftCosts:
        """Measure the seconds of the proposer's own model; 0 without one."""
        return lambda num_rows, k: 0.0

    def prefilled(
        self,
        state: SpecStepInputs,
        batch: PrefillBatch,
        inputs: ModelInputs,
        hidden: Tensor | None,
        newest: Tensor,
    ) -> None:
        """Receive prompt tokens that the target has read.

        Args:
            inputs: the T tokens of the prefill.
            hidden: [T, hidden_size], the target's hidden states of the tokens; None unless the
                strategy `needs_hidden`.
            newest: [J] int64, the token after the chunk, for the J rows that join next.
        """

    def propose(self, state: SpecStepInputs, k: int) -> Drafts:
        """Draft at most k >= 1 tokens for each row."""
        raise NotImplementedError

    def skipped(self, state: SpecStepInputs) -> None:
        """Receive notice of a step without drafts."""

    def overruled(self, state: SpecStepInputs, k: int) -> None:
        """Receive notice that other tokens replace some of the k drafts of each row."""

    def verified(self, state: SpecStepInputs, output: ModelOutput, step: StepOutput) -> None:
        """Receive the tokens that a step decided, with or without drafts, before the rows advance
        by them."""


class NgramProposer(Proposer):
    """Drafts the tokens that followed an earlier occurrence of the row's last tokens, in the same
    row or in others (prompt lookup, Saxena 2023). Drafts end before an image."""

    def propose(self, state: SpecStepInputs, k: int) -> Drafts:
        token_ids, counts = state.store.propose(state.rows.store_rows, k)
        if state.image_ids_from is not None:
            is_token = token_ids < state.image_ids_from
            counts = counts.minimum(is_token.int().cumprod(1).sum(1, dtype=torch.int32))
            token_ids = torch.where(is_token, token_ids, 0)
        return Drafts(token_ids, counts)


class DraftProposer(Proposer):
    """Drafts with a smaller model of the same vocabulary.

    The draft model's KV cache uses the target's block tables. It reads only text: of an image, it
    reads the placeholder tokens.

    The drafts are drawn by the ordinary sampler with the row's own options and random numbers. So a
    draft is the token that the row would get if the target had the draft model's distribution. Both
    tokens come from the same Gumbel noise (a coupling by common random numbers), so they are often
    equal.

    Args:
        for_rejection: whether to draw with separate random numbers, and return the distribution of
            each draft, as rejection sampling requires.
    """

    widths: tuple[int, ...] = (1, 2, CATCH_UP_WIDTH)

    def __init__(self, runner: ModelRunner, for_rejection: bool) -> None:
        self._runner = runner
        self._for_rejection = for_rejection

    def costs(self, max_rows: int, lengths: Sequence[int]) -> DraftCosts:
        forward_seconds = ForwardSeconds.measure(self._runner, max_rows, (1,))
        return lambda num_rows, k: k * forward_seconds(num_rows)

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
        """The draft model's cache has its own drafts in the KV slots of the replaced tokens."""
        state.draft_lag = 1 + k

    def propose(self, state: SpecStepInputs, k: int) -> Drafts:
        while state.draft_lag > 2:
            self._read(state, state.draft_lag, CATCH_UP_WIDTH)
            state.draft_lag = max(2, state.draft_lag - CATCH_UP_WIDTH)
        # Read two tokens: the model that drafted a step's last draft has not read it, and if all
        # drafts held, it is the token before the newest.
        hidden = self._read(state, back=2, width=2).unflatten(0, (-1, 2))[:, 1]
        state.draft_lag = 2

        def read(token_ids: Tensor, positions: Tensor, before: Tensor, hidden: Tensor) -> Tensor:
            inputs = _with_tokens(state.newest, token_ids, positions, width=1)
            return self._runner.hidden_states(inputs)

        return draft_one_by_one(state, k, self._runner, hidden, read, self._for_rejection)

    def _read(self, state: SpecStepInputs, back: int, width: int) -> Tensor:
        """Let the draft model read `width` known tokens of each row, starting with the `back`-th
        newest. If there are fewer, the newest is read several times. Returns the draft model's
        hidden states of the tokens, [B · width, hidden_size]."""
        newest = state.newest.positions.unsqueeze(1)
        offsets = torch.arange(1 - back, 1 - back + width, device=newest.device).clamp(max=0)
        positions = (newest + offsets).clamp(min=0)
        store = state.store.tokens
        token_ids = store[state.rows.store_rows.unsqueeze(1), positions].long()
        inputs = _with_tokens(state.newest, token_ids.flatten(), positions.flatten(), width)
        return self._runner.hidden_states(inputs)


def draft_one_by_one(
    state: SpecStepInputs,
    k: int,
    runner: ModelRunner,
    hidden: Tensor,
    read: Callable[[Tensor, Tensor, Tensor, Tensor], Tensor],
    for_rejection: bool,
) -> Drafts:
    """Draft k tokens for each row, one after another, from hidden states of the drafting model.

    Args:
        k: the number of drafts, at least 1.
        runner: the runner of the drafting model.
        hidden: [B, hidden_size], its hidden states from which the first drafts are drawn.
        read: lets the model read one draft of each row, and returns the hidden states [B,
            hidden_size] for the next one. Arguments: the drafts [B], their positions [B], the
            positions before [B], and the hidden states of these, from which the drafts were drawn.
        for_rejection: as for `DraftProposer`.
    """
    sampling, drafts, probs = state.sampling, [], []
    positions = state.positions_ahead(1 + k).T.contiguous()
    for j in range(k):
        logits, drawn = runner.divided_logits(hidden), positions[j] + 1  # drawn: its position
        if for_rejection:
            processed = process(logits.whole(), sampling, drawn)
            token_ids, distribution = draw_drafts(processed, sampling.seeds, drawn, sampling.greedy)
            probs.append(distribution)
        else:
            token_ids = sample_tokens(logits, sampling, drawn).token_ids[:, 0]
        drafts.append(token_ids)
        if j + 1 < k:
            # Add the draft to the history, so that penalties count it for later drafts, as in
            # verification.
            if sampling.any_penalties:
                sampling.append(token_ids.unsqueeze(1), torch.ones_like(token_ids), drawn)
            hidden = read(token_ids, positions[j + 1], positions[j], hidden)
    counts = torch.full_like(token_ids, k, dtype=torch.int32)
    return Drafts(torch.stack(drafts, 1), counts, torch.stack(probs, 1) if for_rejection else None)


def _with_tokens(
    rows: ModelInputs, input_ids: Tensor, positions: Tensor, width: int
) -> ModelInputs:
    """Make model inputs of `width` tokens for each of B rows. input_ids and positions are [B ·
    width] int64."""
    return ModelInputs(
        input_ids,
        positions,
        rows.block_tables,
        np.full_like(rows.query_lens, width),
        rows.context_lens,
        window_tables=rows.window_tables,
    )
