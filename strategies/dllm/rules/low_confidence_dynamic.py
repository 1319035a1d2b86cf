"""The unmasking rule `low_confidence_dynamic`: a step unmasks all positions whose tokens are likely
enough, and at least a few positions."""

from __future__ import annotations

from dataclasses import dataclass, field

from batchgen.strategies.dllm.rules.rule import Cut, Rule, UnmaskingOrder, check_range


@dataclass(frozen=True, slots=True, kw_only=True)
class LowConfidenceDynamic(Rule):
    """Unmasks all positions above a confidence, and at least the most confident ones.

    Sources: `low_confidence_dynamic` of generate.py in JetAstra/SDAR at 59549b13, whose minimum
    comes from its schedule; `num_to_transfer` of `generate` in modeling_llada2_moe.py of LLaDA2.0.

    Args:
        confidence_threshold: a probability under the distribution that a token was drawn from.
        min_tokens_per_step: the fewest positions that a step unmasks, if as many are masked.
    """

    name: str = field(default="low_confidence_dynamic", init=False)
    confidence_threshold: float = 0.9
    min_tokens_per_step: int = 1

    def __post_init__(self) -> None:
        check_range("confidence_threshold", self.confidence_threshold, 0, 1, "from 0 to 1")
        check_floor(self.min_tokens_per_step)

    def cut(self) -> Cut:
        return Cut(
            order=UnmaskingOrder.CONFIDENCE,
            at_least=self.min_tokens_per_step,
            threshold=self.confidence_threshold,
        )


def check_floor(count: int) -> None:
    """Raise ValueError if a step with this minimum might unmask nothing."""
    check_range("min_tokens_per_step", count, 1, float("inf"), "at least 1")
