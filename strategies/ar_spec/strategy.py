"""Speculative decoding: a proposer drafts tokens, one forward verifies them all."""

from __future__ import annotations

from dataclasses import replace
from typing import Literal

import numpy as np
import torch

from batchgen.engine.constraint.guide import Guide
from batchgen.engine.execution.model_inputs import ModelInputs
from batchgen.engine.execution.model_runner import ModelOutput, ModelRunner
from batchgen.engine.execution.transfer import upload
from batchgen.engine.outputs import HostOutput, OutputColumn, StepOutput
from batchgen.engine.sampling.inputs import SamplingInputs
from batchgen.engine.sampling.sampler import sample
from batchgen.engine.scheduling.scheduled_batch import DecodeBatch, PrefillBatch
from batchgen.engine.strategy import JoiningRows, Limits
from batchgen.strategies.ar_spec.controller import DraftBudget, StepCosts
from batchgen.strategies.ar_spec.proposers import DraftProposer, NgramProposer, Proposer
from batchgen.strategies.ar_spec.step_inputs import Drafts, SpecStepInputs
from batchgen.strategies.ar_spec.verifiers import VERIFIERS
from batchgen.strategies.base.strategy import BaseStrategy

DRAFT_ACCEPTED = OutputColumn("draft_accepted", np.dtype(np.bool_))
"""Whether the token was a draft."""
STEP_MAP = OutputColumn("step_map", np.dtype(np.int32))
"""Which of the row's forwards committed the token, from 1."""

_MOST_DRAFTS = 7
_LENGTHS = (0, 1, 2, 3, 5)
"""Numbers of drafts to choose from, besides the largest: each has kernels of its own."""


class ARSpecStrategy(BaseStrategy):
    """The tokens of `ar` in fewer forwards.

    Args:
        proposer: `ngram` looks up where the row's last tokens stood before, `draft` runs a smaller
            model.
        num_spec_tokens: drafts of a row and step, at most.
        verifier: `pathwise` gives the very tokens of `ar`; `rejection` gives others of the same law
            and accepts a draft model's more often at high temperatures.
        adaptive: choose the number of drafts step by step, down to none, from the batch's size, the
            cost of a forward and how often drafts held; else always num_spec_tokens.
        ngram_min, ngram_max: tokens that must match, of the longest match at most so many.
        ngram_pool: look at the tokens of other rows, too.
        draft_model: for whoever builds the engine: hub name or path of the draft model.
        acceptance_floor: a job of which a smaller share of the drafts held says so at its end.

    Raises:
        ValueError: an option is out of range or does not go with another.
    """

    name = "ar_spec"
    columns: tuple[OutputColumn, ...] = (DRAFT_ACCEPTED, STEP_MAP)
    counts: tuple[str, ...] = ("num_forwards", "num_draft_tokens", "num_accepted_tokens")

    def __init__(
        self,
        proposer: Literal["ngram", "draft"] = "ngram",
        num_spec_tokens: int = 3,
        verifier: Literal["pathwise", "rejection"] = "pathwise",
        adaptive: bool = True,
        ngram_min: int = 2,
        ngram_max: int = 4,
        ngram_pool: bool = False,
        draft_model: str | None = None,
        acceptance_floor: float = 0.2,
    ) -> None:
        checks = (
            ("proposer", proposer in ("ngram", "draft"), "ngram or draft", proposer),
            (
                "num_spec_tokens",
                1 <= num_spec_tokens <= _MOST_DRAFTS,
                f"1 to {_MOST_DRAFTS}",
                num_spec_tokens,
            ),
            ("verifier", verifier in VERIFIERS, " or ".join(VERIFIERS), verifier),
            ("ngram_min", 1 <= ngram_min <= ngram_max, "1 to ngram_max", ngram_min),
            ("ngram_max", ngram_max <= 8, "at most 8", ngram_max),
            ("acceptance_floor", 0 <= acceptance_floor <= 1, "from 0 to 1", acceptance_floor),
        )
        for name, ok, allowed, given in checks:
            if not ok:
                raise ValueError(f"{name} must be {allowed}, got {given!r}")
        if draft_model is not None and proposer != "draft":
            raise ValueError(f"draft_model is set, but proposer is {proposer}: set it to draft")
        if ngram_pool and proposer != "ngram":
            raise ValueError("ngram_pool is true, but the proposer is not ngram: leave it false")
        if verifier == "rejection" and adaptive:
            raise ValueError(
                "verifier rejection needs adaptive=false: its tokens depend on how many drafts a "
                "step has, so a choice by the batch's size would make them depend on other rows"
            )
        if verifier == "rejection" and proposer != "draft":
            raise ValueError(
                f"verifier rejection needs proposer=draft: what {proposer} finds depends on other "
                "rows, and the tokens would with it; pathwise accepts such drafts as often"
            )
        self.proposer_name = proposer
        self.draft_model = draft_model
        self.acceptance_floor = acceptance_floor
        self.num_spec_tokens = num_spec_tokens
        self._verify = VERIFIERS[verifier]
        self._rejection = verifier == "rejection"
        self._adaptive = adaptive
        self._ngram = (ngram_min, ngram_max, ngram_pool)
        self._lengths = (*(k for k in _LENGTHS if k < num_spec_tokens), num_spec_tokens)
        self._proposer: Proposer = NgramProposer()
        self._budget: DraftBudget | None = None
        self._step_inputs = SpecStepInputs()

    @property
    def step_inputs(self) -> SpecStepInputs:
        return self._step_inputs

    @property
    def widths(self) -> tuple[int, ...]:
        return tuple(1 + k for k in self._lengths)

    @property
    def draft_widths(self) -> tuple[int, ...]:
        """Tokens of a row in one forward of the draft model."""
        return DraftProposer.widths

    def allocate(self, limits: Limits) -> None:
        self._step_inputs.allocate(limits, *self._ngram, indexed=self.proposer_name == "ngram")
        self._max_rows = limits.max_rows

    def attach(self, runner: ModelRunner, draft: ModelRunner | None) -> None:
        if (draft is not None) != (self.proposer_name == "draft"):
            has = "no draft model" if draft is None else "a draft model"
            raise ValueError(f"proposer is {self.proposer_name}, but there is {has}")
        if draft is not None:
            self._proposer = DraftProposer(draft, own_law=self._rejection)
        if self._adaptive:
            costs = StepCosts.measure(runner, self._max_rows, self.widths)
            draft_costs = None
            if draft is not None:
                draft_costs = StepCosts.measure(draft, self._max_rows, (1,))
            self._budget = DraftBudget(self._lengths, costs, draft_costs)

    def step_width(self, num_rows: int) -> int:
        if self._budget is None:
            return 1 + self.num_spec_tokens
        return 1 + self._budget.choose(num_rows, self.step_inputs.acceptance)

    @property
    def needs_hidden(self) -> bool:
        return self._proposer.needs_hidden

    def prefilled(
        self, batch: PrefillBatch, inputs: ModelInputs, hidden: torch.Tensor | None
    ) -> None:
        self._proposer.prefilled(self.step_inputs, batch, inputs, hidden)

    def first_tokens(self, output: ModelOutput, rows: JoiningRows) -> StepOutput:
        step = super().first_tokens(output, rows)
        steps = [seq.num_forwards for seq in rows.seqs]
        steps_there = upload(steps, torch.int32, output.positions.device)
        return _with_columns(step, steps_there, rows.sampling)

    def propose(self, batch: DecodeBatch) -> None:
        state = self.step_inputs
        if batch.width == 1:
            state.acceptance.skipped += 1
            self._proposer.skipped(state)
        else:
            state.acceptance.skipped = 0
            drafts = self._proposer.propose(state, batch.width - 1)
            if batch.guide is not None and not self._rejection:
                drafts = self._with_forced(drafts, batch.guide)
            state.set_drafts(drafts, send=batch.guide is not None)

    def _with_forced(self, drafts: Drafts, guide: Guide) -> Drafts:
        """With the tokens that constraints leave no choice about, before all others."""
        k = drafts.token_ids.shape[1]
        forced = guide.forced(k)
        if forced is None:
            return drafts
        if self._proposer.widths:  # its cache has other tokens there
            self.step_inputs.draft_lag = 1 + k
        there = upload(forced, torch.int64, drafts.token_ids.device)
        known = there >= 0
        count = known.sum(1, dtype=torch.int32)
        # What was drafted behind other tokens does not follow these.
        agree = ((drafts.token_ids == there) | ~known).all(1) & (drafts.counts >= count)
        counts = torch.where((count > 0) & ~agree, count, drafts.counts)
        return replace(drafts, token_ids=torch.where(known, there, drafts.token_ids), counts=counts)

    @property
    def proposes_from_guide(self) -> bool:
        return not self._rejection

    def decide(self, output: ModelOutput, guide: Guide | None) -> StepOutput:
        state = self.step_inputs
        drafts, steps = state.drafts, state.rows.steps
        mask = None
        if guide is not None and drafts is None:
            mask = guide.mask(output.logits)
        elif guide is not None:
            mask = guide.mask_drafts(output.logits, *state.drafts_on_host)
        if self.needs_hidden:
            state.hidden = output.hidden
        if drafts is None:
            step = sample(output.logits, state.sampling, output.positions + 1, mask=mask)
        else:
            step = replace(self._verify(state, output, drafts, mask), num_drafts=drafts.counts)
        step = replace(step, unread_tokens=state.draft_lag)
        return _with_columns(step, steps, state.sampling)

    def observe(self, step: HostOutput) -> None:
        if step.num_drafts is not None:
            k = step.token_ids.shape[1] - 1
            self.step_inputs.acceptance.observe(step.num_tokens - ~step.broken, k)


def _with_columns(step: StepOutput, steps: torch.Tensor, sampling: SamplingInputs) -> StepOutput:
    """With what speculation knows of the tokens, if a row asks for it.

    Args:
        steps: [B] int32, the rows' forwards before.
    """
    if not sampling.any_columns:
        return step
    place = torch.arange(step.token_ids.shape[1], device=steps.device)
    # The last token of a row that can go on is the model's own.
    num_drafts = step.num_tokens - (~step.broken).int()
    columns = {
        DRAFT_ACCEPTED.name: place < num_drafts.unsqueeze(1),
        STEP_MAP.name: (steps + 1).unsqueeze(1).expand(-1, len(place)),
    }
    return replace(step, columns={**step.columns, **columns})
