"""The unmasking rule `joint_threshold`: a step unmasks all positions whose tokens are likely
enough, and replaces earlier tokens of the block by better ones."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import ClassVar

from batchgen.strategies.dllm.rules.low_confidence_dynamic import check_floor
from batchgen.strategies.dllm.rules.rule import Cut, Rule, UnmaskingOrder, check_range


@dataclass(frozen=True, slots=True, kw_only=True)
class JointThreshold(Rule):
    """`LowConfidenceDynamic` with editing (LLaDA2.1, arXiv 2602.08676).

    Every step also replaces each token of the block that is neither masked nor in the prompt, if
    another token is drawn at its position with a confidence above a threshold. When nothing is
    masked, steps continue until one replaces nothing, or for a number of steps.

    Sources: dllm/algorithm/joint_threshold.py of sgl-project/sglang at 17d57211, and
    pipelines/llada21/sampler.py of lingjiechen2/dllm at 9268328a, which is `generate` of the
    checkpoints' modelling code.

    Args:
        confidence_threshold: see `LowConfidenceDynamic`; for masked positions.
        edit_threshold: a probability; 0 replaces every token that is drawn differently.
        max_edit_steps: the most editing steps of a block in which nothing is masked.
        min_tokens_per_step: see `LowConfidenceDynamic`.
    """

    name: str = field(default="joint_threshold", init=False)
    edits: ClassVar[bool] = True
    confidence_threshold: float = 0.9
    edit_threshold: float = 0.5
    max_edit_steps: int = 16
    min_tokens_per_step: int = 1

    def __post_init__(self) -> None:
        check_range("confidence_threshold", self.confidence_threshold, 0, 1, "from 0 to 1")
        check_range("edit_threshold", self.edit_threshold, 0, 1, "from 0 to 1")
        check_range("max_edit_steps", self.max_edit_steps, 0, 2**31 - 1, "at least 0")
        check_floor(self.min_tokens_per_step)

    def cut(self) -> Cut:
        return Cut(
            order=UnmaskingOrder.CONFIDENCE,
            at_least=self.min_tokens_per_step,
            threshold=self.confidence_threshold,
            edit_threshold=self.edit_threshold,
            edit_steps=self.max_edit_steps,
        )
