"""The strategy `ar_spec`: speculative decoding (Leviathan et al. 2023). A proposer drafts tokens
for each row, and one forward of the target verifies them all. The engine calls the methods of
`Strategy`, where those without a docstring here are described."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any, Literal

import numpy as np
import numpy.typing as npt
import torch

from batchgen.engine.device.transfer import upload
from batchgen.engine.execution.model_inputs import ModelInputs
from batchgen.engine.execution.model_runner import ModelOutput, ModelRunner
from batchgen.engine.interface.outputs import HostOutput, OutputColumn, RowCount, StepOutput
from batchgen.engine.rows.guide import Guide
from batchgen.engine.rows.scheduled_batch import DecodeBatch, PrefillBatch
from batchgen.engine.sampling.sampler import sample_tokens
from batchgen.engine.sampling.sampling_inputs import SamplingInputs
from batchgen.engine.step_inputs import JoiningRows
from batchgen.engine.strategy import TARGET, Checkpoint, Head, Limits, ModelRole, Strategy
from batchgen.strategies.ar_spec.controller import DraftBudget, ForwardSeconds
from batchgen.strategies.ar_spec.mtp import MTPProposer
from batchgen.strategies.ar_spec.proposers import DraftProposer, NgramProposer, Proposer
from batchgen.strategies.ar_spec.step_inputs import Drafts, SpecStepInputs
from batchgen.strategies.ar_spec.verifiers import VERIFIERS
from batchgen.strategies.counts import NUM_FORWARDS, one_forward, tokens_per_forward

DRAFT = "draft"
"""The name of the draft model among the strategy's models."""
MTP = "mtp"
"""The name of the multi-token prediction head, among the target's heads and among the strategy's
models."""

DRAFT_ACCEPTED = OutputColumn("draft_accepted", np.dtype(np.bool_))
"""Whether the token was a draft."""
STEP_MAP = OutputColumn("step_map", np.dtype(np.int32))
"""Which of the row's forwards yielded the token, starting at 1."""
NUM_DRAFT_TOKENS = RowCount("num_draft_tokens", "tokens that were drafted for the row")
NUM_ACCEPTED_TOKENS = RowCount("num_accepted_tokens", "of token_ids, how many were drafts")

PROPOSERS = ("ngram", "draft", "mtp")
"""The values of the option `proposer`."""
_MOST_DRAFTS = 7
"""The most drafts per row and step."""
_LENGTHS = (0, 1, 2, 3, 5)
"""The numbers of drafts to choose from, in addition to `num_spec_tokens`. They are few because each
needs separate CUDA graphs."""


class ARSpecStrategy(Strategy):
    """Decodes like `ar`, but with several tokens per forward where drafts hold.

    Args:
        proposer: `ngram` drafts what followed an earlier occurrence of the row's last tokens;
            `draft` uses a smaller model, and `mtp` the model's own head for multi-token prediction.
        num_spec_tokens: the most drafts of a row in one step.
        verifier: `pathwise` yields exactly the tokens of `ar`. `rejection` yields other tokens of
            the same distribution; at high temperatures it accepts more drafts of a model or head.
        adaptive: whether to choose the number of drafts of each step, including none, from the
            number of rows, the time of a forward and how often drafts held. If not, it is always
            num_spec_tokens.
        ngram_min: the fewest tokens that must match an earlier occurrence.
        ngram_max: the most tokens that are matched.
        ngram_pool: whether to look for matches in other rows, too.
        draft_model: the hub name or path of the draft model, which the engine's builder loads.
        acceptance_floor: if a smaller share of a job's drafts held, the job's summary says so.

    Raises:
        ValueError: an option is out of range, or conflicts with another.
    """

    name = "ar_spec"
    columns: tuple[OutputColumn, ...] = (DRAFT_ACCEPTED, STEP_MAP)
    counts: tuple[RowCount, ...] = (NUM_FORWARDS, NUM_DRAFT_TOKENS, NUM_ACCEPTED_TOKENS)

    def __init__(
        self,
        proposer: Literal["ngram", "draft", "mtp"] = "ngram",
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
            ("proposer", proposer in PROPOSERS, "ngram, draft or mtp", proposer),
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
        for name, ok, allowed, value in checks:
            if not ok:
                raise ValueError(f"{name} must be {allowed}, got {value!r}")
        if draft_model is not None and proposer != "draft":
            raise ValueError(f"draft_model is set, but proposer is {proposer}: set it to draft")
        if ngram_pool and proposer != "ngram":
            raise ValueError("ngram_pool is true, but the proposer is not ngram: leave it false")
        if verifier == "rejection" and adaptive:
            raise ValueError(
                "verifier rejection needs adaptive=false: its tokens depend on how many drafts a "
                "step has, so a choice by the batch's size would make them depend on other rows"
            )
        if verifier == "rejection" and proposer == "ngram":
            raise ValueError(
                "verifier rejection needs proposer=draft or mtp: the drafts of ngram depend on "
                "other rows, and with this verifier tokens would, too. The verifier pathwise "
                "accepts these drafts just as often"
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
    def models(self) -> Mapping[str, ModelRole]:
        """The target, and the draft model or head if there is one."""
        widths = tuple(1 + k for k in self._lengths)
        models = {TARGET: ModelRole(widths)}
        purpose = f"strategy.proposer is {self.proposer_name}"
        if self.proposer_name == "draft":
            source = Checkpoint("draft_model", self.draft_model, purpose)
            models[DRAFT] = ModelRole(DraftProposer.widths, source=source)
        if self.proposer_name == "mtp":
            head = Head(MTP, "strategy.proposer=mtp", "set strategy.proposer to ngram")
            models[MTP] = ModelRole(widths, tokens_ahead=1, source=head)
        return models

    def allocate(self, limits: Limits) -> None:
        self._step_inputs.allocate(limits, *self._ngram, indexed=self.proposer_name == "ngram")
        self._max_rows = limits.max_rows

    def attach(self, runners: Mapping[str, ModelRunner]) -> None:
        for name, proposer in ((DRAFT, DraftProposer), (MTP, MTPProposer)):
            if name in runners:
                self._proposer = proposer(runners[name], for_rejection=self._rejection)
        if self._adaptive:
            widths = self.models[TARGET].widths
            costs = ForwardSeconds.measure(runners[TARGET], self._max_rows, widths)
            draft_costs = self._proposer.costs(self._max_rows, self._lengths)
            self._budget = DraftBudget(self._lengths, costs, draft_costs)

    def step_width(self, num_rows: int) -> int:
        if self._budget is None:
            return 1 + self.num_spec_tokens
        return 1 + self._budget.choose(num_rows, self.step_inputs.acceptance)

    @property
    def needs_hidden(self) -> bool:
        return self.proposer_name == "mtp"

    def prefilled(
        self,
        batch: PrefillBatch,
        inputs: ModelInputs,
        hidden: torch.Tensor | None,
        newest: torch.Tensor,
    ) -> None:
        self._proposer.prefilled(self.step_inputs, batch, inputs, hidden, newest)

    def first_tokens(self, output: ModelOutput, rows: JoiningRows) -> StepOutput:
        step = super().first_tokens(output, rows)
        steps = [seq.counts.get(NUM_FORWARDS.name, 0) for seq in rows.seqs]
        previous_steps = upload(steps, torch.int32, output.positions.device)
        return _described(step, drafts=None, steps=previous_steps, sampling=rows.sampling)

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
        """Replace the first drafts of constrained rows by the tokens that their constraints force.
        Later drafts are kept only if the proposer had drafted these tokens, too."""
        k = drafts.token_ids.shape[1]
        forced = guide.forced(k)
        if forced is None:
            return drafts
        self._proposer.overruled(self.step_inputs, k)
        forced_ids = upload(forced, torch.int64, drafts.token_ids.device)
        is_forced = forced_ids >= 0
        count = is_forced.sum(1, dtype=torch.int32)
        # If the proposer drafted other tokens than the forced ones, its later drafts do not follow
        # them.
        agree = ((drafts.token_ids == forced_ids) | ~is_forced).all(1) & (drafts.counts >= count)
        counts = torch.where((count > 0) & ~agree, count, drafts.counts)
        token_ids = torch.where(is_forced, forced_ids, drafts.token_ids)
        return replace(drafts, token_ids=token_ids, counts=counts)

    @property
    def proposes_from_guide(self) -> bool:
        return not self._rejection

    @property
    def depends_on_drafts(self) -> bool:
        return self._rejection

    @property
    def by_schedule(self) -> frozenset[str]:
        # Preemption changes where steps begin, and so what they draft; n-grams of other rows
        # displace those of a row; and an adaptive number of drafts depends on clocks.
        counts = {count.name for count in self.counts}
        return frozenset(counts | {column.name for column in self.columns})

    def decide(self, output: ModelOutput, guide: Guide | None) -> StepOutput:
        state = self.step_inputs
        drafts, steps = state.drafts, state.rows.steps
        mask = None
        if guide is not None and drafts is None:
            mask = guide.mask(output.logits)
        elif guide is not None:
            mask = guide.mask_drafts(output.logits, *state.drafts_on_host)
        if drafts is None:
            step = sample_tokens(output.divided, state.sampling, output.positions + 1, mask=mask)
        else:
            step = self._verify(state, output, drafts, mask)
        self._proposer.verified(state, output, step)
        step = replace(step, unread_tokens=state.draft_lag)
        return _described(step, drafts, steps, state.sampling)

    def observe(self, step: HostOutput, current: npt.NDArray[np.bool_]) -> None:
        if (k := step.token_ids.shape[1] - 1) and current.any():
            accepted = step.num_tokens - ~step.broken
            self.step_inputs.acceptance.observe(accepted[current], k)

    def summary(
        self, counts: Mapping[str, int], stats: Mapping[str, Any], num_tokens: int
    ) -> list[tuple[str, str]]:
        lines = []
        if proposed := counts[NUM_DRAFT_TOKENS.name]:
            share = counts[NUM_ACCEPTED_TOKENS.name] / proposed
            lines.append(("drafts", f"{proposed:,} proposed, {share:.1%} accepted"))
        return [*lines, *tokens_per_forward(counts, num_tokens)]

    def remark(self, counts: Mapping[str, int]) -> str | None:
        proposed, accepted = counts[NUM_DRAFT_TOKENS.name], counts[NUM_ACCEPTED_TOKENS.name]
        if not counts[NUM_FORWARDS.name]:
            return None
        if not proposed:
            why = "none would have saved time"
            if self.proposer_name == "ngram":
                why += ", or no text came twice"
            return f"No drafts were proposed: {why}. strategy=ar is as fast here."
        if accepted >= self.acceptance_floor * proposed:
            return None
        other = "draft with a draft model" if self.proposer_name == "ngram" else "ngram"
        return (
            f"Only {accepted / proposed:.1%} of the drafts were accepted, and "
            f"strategy.acceptance_floor is {self.acceptance_floor:.1%}: use strategy=ar, another "
            f"proposer (strategy.proposer={other}), or fewer drafts (strategy.num_spec_tokens)."
        )


def _described(
    step: StepOutput, drafts: Drafts | None, steps: torch.Tensor, sampling: SamplingInputs
) -> StepOutput:
    """Add the strategy's counts to a step, and its columns if any row asks for one.

    Args:
        drafts: the drafts that the step verified; None without drafts.
        steps: [B] int32, how many forwards have yielded tokens of each row before.
    """
    step = step.with_counts(num_forwards=one_forward(step))
    if drafts is None and not sampling.any_columns:
        return step
    offsets = torch.arange(step.token_ids.shape[1], device=steps.device)
    # The last token of a row is the target's own, unless the row failed or has a conflict.
    num_accepted = step.num_tokens - (~step.broken).int()
    is_draft = offsets < num_accepted.unsqueeze(1)
    if drafts is not None:
        counts = {NUM_DRAFT_TOKENS.name: drafts.counts, NUM_ACCEPTED_TOKENS.name: is_draft}
        step = step.with_counts(**counts)
    if not sampling.any_columns:
        return step
    columns = {
        DRAFT_ACCEPTED.name: is_draft,
        STEP_MAP.name: (steps + 1).unsqueeze(1).expand(-1, len(offsets)),
    }
    return replace(step, columns={**step.columns, **columns})
