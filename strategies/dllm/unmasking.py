"""Decides which of a denoise step's drawn tokens are kept (unmasked), by the rule of each row.
`DLLMStepInputs` holds the `RuleRows`."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

import numpy as np
import torch
from torch import Tensor

from batchgen.engine.device.batched import Batched, row
from batchgen.engine.device.transfer import upload
from batchgen.engine.sampling.sampler import Drawn
from batchgen.kernels.sampling.unmask import unmask
from batchgen.strategies.dllm.edits import MOST_EDITS
from batchgen.strategies.dllm.rules.rule import Rule, UnmaskingOrder

_INF = float("inf")


@dataclass(frozen=True)
class RuleRows(Batched):
    """The unmasking rules of B rows, and their numbers (`Cut`) on the device. Properties say what
    any of the rows needs, without waiting for the device."""

    rules: tuple[Rule, ...] = row()  # of the B rows, on the host
    order: Tensor = row()  # [B] int64
    steps: Tensor = row()  # [B] int64
    at_least: Tensor = row()  # [B] int64
    threshold: Tensor = row()  # [B] float32
    bound: Tensor = row()  # [B] float32
    edit_threshold: Tensor = row()  # [B] float32
    edit_steps: Tensor = row()  # [B] int64

    @classmethod
    def build(cls, rules: Sequence[Rule], device: torch.device) -> RuleRows:
        """Upload the numbers of B rules."""
        cuts = [rule.cut() for rule in rules]
        ints = [[c.order, c.steps, min(c.at_least, 2**31), c.edit_steps] for c in cuts]
        floats = [[c.threshold, c.bound, c.edit_threshold] for c in cuts]
        order, steps, at_least, edit_steps = upload(np.array(ints).T.copy(), torch.int64, device)
        threshold, bound, edit_threshold = upload(np.array(floats).T.copy(), torch.float32, device)
        return cls(
            tuple(rules), order, steps, at_least, threshold, bound, edit_threshold, edit_steps
        )

    @cached_property
    def _orders(self) -> frozenset[UnmaskingOrder]:
        """The orders of any rows."""
        return frozenset(rule.cut().order for rule in self.rules)

    @cached_property
    def _any_threshold(self) -> bool:
        """Whether any row unmasks positions above a confidence."""
        return any(rule.cut().threshold < _INF for rule in self.rules)

    @cached_property
    def any_edits(self) -> bool:
        """Whether any row has a rule that replaces unmasked tokens."""
        return any(rule.edits for rule in self.rules)

    @cached_property
    def most_edit_steps(self) -> int:
        """The most editing steps of any row's block without masks, at most as many as a log can
        hold."""
        steps = [rule.cut().edit_steps for rule in self.rules if rule.edits]
        return min(max(steps, default=0), MOST_EDITS)

    @property
    def any_confidence(self) -> bool:
        """Whether any row needs the confidences of drawn tokens."""
        return UnmaskingOrder.CONFIDENCE in self._orders or self._any_threshold or self.any_edits

    @property
    def any_entropy(self) -> bool:
        """Whether any row needs the entropies of the distributions that tokens are drawn from."""
        return UnmaskingOrder.ENTROPY in self._orders

    def unmasked(self, masked: Tensor, denoised: Tensor, drawn: Drawn) -> Tensor:
        """Return the positions that a step unmasks, [B, L] bool.

        Args:
            masked: [B, L] bool, the masked positions.
            denoised: [B] int64, how many denoise steps each row's block has had.
            drawn: a token for each of the B · L positions, with confidence and entropy if any row
                needs them.
        """
        return self._run(masked, denoised, drawn, self._keys(masked, drawn))

    def permitted(self, masked: Tensor, denoised: Tensor, drawn: Drawn) -> Tensor:
        """Return the positions of constrained rows that a step may unmask, provided that it unmasks
        all masked positions before them, [B, L] bool: those that each rule would keep if its order
        were from left to right."""
        return self._run(masked, denoised, drawn, None)

    def _run(self, masked: Tensor, denoised: Tensor, drawn: Drawn, keys: Tensor | None) -> Tensor:
        """Return the positions that a step unmasks, ranked by descending `keys` [B, L]; None: from
        left to right. Otherwise as `unmasked`."""
        length = masked.shape[1]
        steps = self.steps.clamp(min=1)
        # The positions of a block, divided evenly among its steps, larger shares first.
        spread = length // steps + (denoised < length % steps)
        counts = torch.where(self.steps > 0, spread.clamp(min=1), self.at_least)
        confidence = threshold = entropy = bound = None
        if self._any_threshold:
            confidence, threshold = _of_blocks(drawn.confidence, masked), self.threshold
        if self.any_entropy:
            entropy, bound = _of_blocks(drawn.entropy, masked), self.bound
        return unmask(masked, counts, keys, confidence, threshold, entropy, bound)

    def _keys(self, masked: Tensor, drawn: Drawn) -> Tensor | None:
        """Return the numbers by which positions rank, [B, L] float32; None if all rows rank from
        left to right."""
        keys: Tensor | None = None
        for order in self._orders - {UnmaskingOrder.POSITION}:
            if order is UnmaskingOrder.CONFIDENCE:
                values = _of_blocks(drawn.confidence, masked)
            else:
                values = -_of_blocks(drawn.entropy, masked)
            if len(self._orders) > 1:
                rest = torch.zeros_like(values) if keys is None else keys
                values = torch.where((self.order == order).unsqueeze(1), values, rest)
            keys = values
        return keys

    def edited(self, old_ids: Tensor, drawn: Drawn) -> Tensor:
        """Return the positions whose tokens a step replaces by drawn ones, [B, L] bool.

        Args:
            old_ids: [B, L] int64, the tokens that may be replaced; elsewhere -1.
            drawn: as for `unmasked`.
        """
        is_other = (old_ids >= 0) & (drawn.token_ids.view(old_ids.shape) != old_ids)
        return is_other & (_of_blocks(drawn.confidence, old_ids) > self.edit_threshold.unsqueeze(1))


def _of_blocks(values: Tensor | None, like: Tensor) -> Tensor:
    """Reshape values [B · L] to [B, L]."""
    assert values is not None, "the rows' rules need them"
    return values.view(like.shape)
