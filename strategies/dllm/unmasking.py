"""Which of the tokens that a denoise step draws it keeps."""

from __future__ import annotations

import torch
from torch import Tensor

from batchgen.engine.device.transfer import upload
from batchgen.kernels.sampling.unmask import Rule, schedule, unmask
from batchgen.strategies.dllm.step_inputs import BlockRows


class Unmasking:
    """An unmasking rule with its options; `DLLMStrategy` explains them."""

    def __init__(self, rule: Rule, threshold: float, steps: int | None) -> None:
        self._rule, self._threshold, self._asked_steps = rule, threshold, steps
        self._schedule: Tensor | None = None

    @property
    def needs_confidence(self) -> bool:
        return self._rule is not Rule.SEQUENTIAL

    def chosen(self, blocks: BlockRows, confidence: Tensor | None) -> Tensor:
        """[B, L] bool, the positions that a step unmasks, given the confidence [B · L] of the drawn
        tokens (None for `sequential`)."""
        if confidence is not None:
            confidence = confidence.view(blocks.masked.shape)
        if self._rule is Rule.LOW_CONFIDENCE_DYNAMIC:
            return unmask(self._rule, blocks.masked, confidence, threshold=self._threshold)
        return unmask(self._rule, blocks.masked, confidence, counts=self._counts(blocks))

    def permitted(self, blocks: BlockRows, confidence: Tensor | None) -> Tensor:
        """[B, L] bool, the positions of constrained rows that a step may unmask, if it unmasks all
        before them as well."""
        if self._rule is Rule.LOW_CONFIDENCE_DYNAMIC:
            assert confidence is not None
            return confidence.view(blocks.masked.shape) > self._threshold
        return unmask(Rule.SEQUENTIAL, blocks.masked, None, counts=self._counts(blocks))

    def _counts(self, blocks: BlockRows) -> Tensor:
        """[B] int64, how many positions this step unmasks by the schedule of denoising_steps."""
        length = blocks.masked.shape[1]
        if self._schedule is None:
            counts = schedule(length, self._asked_steps or length)
            self._schedule = upload(counts, torch.int64, blocks.denoised.device)
        # A commit forward comes after the last step of the schedule. Nothing is masked in it, so
        # any count will do.
        return self._schedule[blocks.denoised.clamp(max=len(self._schedule) - 1)]
