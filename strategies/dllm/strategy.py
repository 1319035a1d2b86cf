"""Block diffusion (SDAR, Cheng et al. 2025): the tokens of a block come in any order."""

from __future__ import annotations

from typing import Literal

import numpy as np
import torch
from torch import Tensor

from batchgen.engine.constraint.guide import Guide
from batchgen.engine.execution.model_runner import ModelOutput, ModelRunner
from batchgen.engine.execution.transfer import upload
from batchgen.engine.models.config import ModelConfig
from batchgen.engine.outputs import HostOutput, OutputColumn, StepOutput
from batchgen.engine.sampling.params import SamplingParams
from batchgen.engine.sampling.sampler import Drawn, draw
from batchgen.engine.scheduling.admission import Ints
from batchgen.engine.scheduling.scheduled_batch import DecodeBatch
from batchgen.engine.sequence import Sequence
from batchgen.kernels.sampling.token_mask import TokenMask
from batchgen.kernels.sampling.unmask import MAX_BLOCK_LENGTH, Rule, schedule, unmask
from batchgen.strategies.base.strategy import BaseStrategy
from batchgen.strategies.dllm.guided import denoise
from batchgen.strategies.dllm.step_inputs import STEP_MAP, DLLMStepInputs

_FIRST_COMPLETING = 0.5
"""Share of the rows whose block a step completes, before any was seen."""
_LEARNING_RATE = 0.1
_FREE_TOKENS = 64
"""A forward of fewer takes about as long: it reads the weights."""


class DLLMStrategy(BaseStrategy):
    """Blocks of masked positions, denoised in steps that each keep some of the tokens drawn.

    Args:
        block_length: positions of a block; None is what the model says.
        unmasking: what a step keeps: `low_confidence_dynamic` all tokens above
            confidence_threshold, and at least the likeliest; `low_confidence_static` the likeliest,
            as many as make denoising_steps steps; `sequential` the first, as many.
        confidence_threshold: probability under the distribution that the token was drawn from.
        denoising_steps: of a block, for the last two; None is one for each position.
        fused_commit: the final KV of a block is computed in the forward of the next block's first
            denoise step, not in one of its own. The tokens are the same.

    Raises:
        ValueError: an option is out of range or does not go with another.
    """

    name = "dllm"
    columns: tuple[OutputColumn, ...] = (STEP_MAP,)
    counts: tuple[str, ...] = ("num_forwards", "num_commit_forwards")

    def __init__(
        self,
        block_length: int | None = None,
        unmasking: Literal[
            "low_confidence_dynamic", "low_confidence_static", "sequential"
        ] = "low_confidence_dynamic",
        confidence_threshold: float = 0.9,
        denoising_steps: int | None = None,
        fused_commit: bool = True,
    ) -> None:
        checks = (
            (
                "block_length",
                block_length is None or 2 <= block_length <= MAX_BLOCK_LENGTH,
                f"2 to {MAX_BLOCK_LENGTH}",
                block_length,
            ),
            ("unmasking", unmasking in list(Rule), " or ".join(Rule), unmasking),
            (
                "confidence_threshold",
                0 <= confidence_threshold <= 1,
                "from 0 to 1",
                confidence_threshold,
            ),
            (
                "denoising_steps",
                denoising_steps is None or denoising_steps >= 1,
                "at least 1",
                denoising_steps,
            ),
        )
        for name, ok, allowed, given in checks:
            if not ok:
                raise ValueError(f"{name} must be {allowed}, got {given!r}")
        self._rule = Rule(unmasking)
        if self._rule is Rule.LOW_CONFIDENCE_DYNAMIC and denoising_steps is not None:
            raise ValueError(
                "denoising_steps is set, but unmasking low_confidence_dynamic takes as many steps "
                "as confidence_threshold asks for: leave it null"
            )
        self._asked_length = block_length
        self._threshold = confidence_threshold
        self._asked_steps = denoising_steps
        self._fused = fused_commit
        self._completing = _FIRST_COMPLETING
        self._runner: ModelRunner | None = None
        self._length = 0
        self._schedule: Tensor | None = None
        self._step_inputs: DLLMStepInputs | None = None

    @property
    def step_inputs(self) -> DLLMStepInputs:
        assert self._step_inputs is not None, "block_length comes first"
        return self._step_inputs

    def block_length(self, model: ModelConfig) -> int:
        """The length of its blocks, which the model was trained for."""
        if model.diffusion is None:
            raise ValueError(
                f"strategy dllm needs a diffusion model, and {model.architecture} predicts next "
                "tokens: use strategy=ar"
            )
        length = self._asked_length or model.diffusion.block_length
        if length is None:
            raise ValueError(
                "block_length is null, and the model does not say for which it was trained: set "
                "it (4 for SDAR-*-Chat, N for SDAR-*-Chat-bN)"
            )
        if self._step_inputs is None:
            self._length = length
            self._step_inputs = DLLMStepInputs(length, model.diffusion.mask_token_id)
        return length

    @property
    def widths(self) -> tuple[int, ...]:
        return (self._length,)

    @property
    def forward_rows(self) -> int:
        return 2 if self._fused else 1

    @property
    def prefill_multiple(self) -> int:
        return self._length

    @property
    def least_tokens(self) -> int:
        return 0

    def step_width(self, num_rows: int) -> int:
        return self._length

    def prefill_of(self, seq: Sequence) -> tuple[int, bool]:
        """The whole blocks; what is left begins the first block to denoise."""
        return seq.num_tokens // self._length * self._length, False

    def kv_tokens(self, num_tokens: Ints, pending: Ints, width: int, max_tokens: Ints) -> Ints:
        """A block to its end, though the row may end within."""
        length = self._length
        end = (num_tokens + pending) // length * length + length
        tokens: Ints = np.minimum(end, -(-max_tokens // length) * length)
        return tokens

    def check(self, params: SamplingParams) -> None:
        if params.has_penalties:
            raise ValueError(
                "penalties count the tokens before a position, and strategy dllm draws tokens "
                "before those are known: set repetition_penalty to 1, presence_penalty and "
                "frequency_penalty to 0"
            )

    def attach(self, runner: ModelRunner, draft: ModelRunner | None) -> None:
        super().attach(runner, draft)
        self._runner = runner

    def propose(self, batch: DecodeBatch) -> None:
        self.step_inputs.fuse(self._room(len(batch.slots)) if self._fused else 0)
        if batch.guide is not None:
            self.step_inputs.send_masked()

    def _room(self, rows: int) -> int:
        """Rows of the next forward for blocks that are complete, whose number is known on the
        device alone. A row more than needed costs as much as one that then finds no room.
        """
        runner, length = self._runner, self._length
        assert runner is not None
        if runner.device.type == "cpu":
            return int(self.step_inputs.complete.sum())
        free = _FREE_TOKENS // length - rows
        total = rows + min(max(round(rows * self._completing), free), rows)
        return min(runner.filled_rows(total, length) - rows, rows)

    def observe(self, step: HostOutput) -> None:
        """How many blocks a step completes."""
        share = float((step.num_tokens > 0).mean())
        self._completing += _LEARNING_RATE * (share - self._completing)

    def forward(self, runner: ModelRunner) -> ModelOutput:
        """The logits are of the rows' own blocks."""
        inputs = self.step_inputs.model_inputs
        count = self.step_inputs.blocks.masked.numel()
        hidden = runner.hidden_states(inputs)[:count]
        return ModelOutput(runner.compute_logits(hidden), inputs.positions[:count], hidden)

    def decide(self, output: ModelOutput, guide: Guide | None) -> StepOutput:
        state = self.step_inputs
        blocks, length = state.blocks, self._length
        conflicts: Tensor | None = None
        if guide is None:
            drawn = self._draw(output)
            transfer = self._transfer(drawn.confidence)
        else:
            drawn, transfer, conflicts = self._decide_guided(output, guide)
        broken = (drawn.failed.view(-1, length) & blocks.masked).any(1)
        columns = {name: v.view(-1, length, *v.shape[1:]) for name, v in drawn.columns.items()}
        step_map = (blocks.steps + 1).unsqueeze(1).expand(-1, length).contiguous()
        columns[STEP_MAP.name] = step_map
        complete, token_ids = state.unmask(transfer, drawn.token_ids.view(-1, length), columns)
        # What a block yields begins behind what is the prompt's.
        offsets = torch.arange(length, device=blocks.given.device)
        order = (blocks.given.unsqueeze(1) + offsets).clamp(max=length - 1)
        num_tokens = torch.where(complete & ~broken, length - blocks.given, 0)
        if conflicts is not None:
            # What is known of the block stands at its beginning.
            known = (~blocks.masked | transfer).cumprod(1).sum(1)
            conflicts = conflicts & ~broken
            num_tokens = torch.where(conflicts, known - blocks.given, num_tokens)
        return StepOutput(
            num_tokens=num_tokens.int(),
            token_ids=token_ids.gather(1, order),
            failed=broken,
            columns={name: _ordered(v, order) for name, v in state.columns.items()},
            commits=state.complete,
            unread_tokens=length,
            conflicts=conflicts,
        )

    def _draw(self, output: ModelOutput, mask: TokenMask | None = None) -> Drawn:
        """A token for each position of the blocks."""
        state = self.step_inputs
        return draw(
            output.logits,
            state.repeated,
            output.positions,
            state.blocks.denoised.repeat_interleave(self._length),
            confidence=self._rule is not Rule.SEQUENTIAL,
            mask=mask,
        )

    def _decide_guided(self, output: ModelOutput, guide: Guide) -> tuple[Drawn, Tensor, Tensor]:
        """The tokens drawn, which are kept [B, L], and the rows whose constraints conflict [B]."""
        state, device = self.step_inputs, output.logits.device
        drawn, taken = denoise(
            guide,
            state.masked_on_host,
            output.logits,
            lambda mask: self._draw(output, mask),
            self._permitted,
        )
        transfer = torch.where(
            upload(taken.rows, torch.bool, device).unsqueeze(1),
            upload(taken.places, torch.bool, device),
            self._transfer(drawn.confidence),
        )
        return drawn, transfer, upload(taken.conflicts, torch.bool, device)

    def _permitted(self, drawn: Drawn) -> Tensor:
        """[B, L] bool: what a step may keep of a block that is unmasked from left to right."""
        masked = self.step_inputs.blocks.masked
        if self._rule is Rule.LOW_CONFIDENCE_DYNAMIC:
            assert drawn.confidence is not None
            return drawn.confidence.view(masked.shape) > self._threshold
        return unmask(Rule.SEQUENTIAL, masked, None, counts=self._counts())

    def _transfer(self, confidence: Tensor | None) -> Tensor:
        """[B, L] bool, what the step keeps of the tokens of these probabilities [B · L]."""
        blocks = self.step_inputs.blocks
        if confidence is not None:
            confidence = confidence.view(-1, self._length)
        if self._rule is Rule.LOW_CONFIDENCE_DYNAMIC:
            return unmask(self._rule, blocks.masked, confidence, threshold=self._threshold)
        return unmask(self._rule, blocks.masked, confidence, counts=self._counts())

    def _counts(self) -> Tensor:
        """[B] int64, how many positions the schedule unmasks in each row's step."""
        denoised = self.step_inputs.blocks.denoised
        if self._schedule is None:
            counts = schedule(self._length, self._asked_steps or self._length)
            self._schedule = upload(counts, torch.int64, denoised.device)
        # A block whose beginning was given needs fewer steps, none needs more.
        return self._schedule[denoised.clamp(max=len(self._schedule) - 1)]


def _ordered(values: Tensor, order: Tensor) -> Tensor:
    """values [B, L, *tail] at the places order [B, L]."""
    index = order.view(*order.shape, *[1] * (values.dim() - 2)).expand_as(values)
    return values.gather(1, index)
