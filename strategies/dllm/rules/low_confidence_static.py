"""The unmasking rule `low_confidence_static`: a step unmasks the positions with the likeliest
tokens, as many as finish a block in a fixed number of steps."""

from __future__ import annotations

from dataclasses import dataclass, field

from batchgen.strategies.dllm.rules.rule import Cut, Rule, UnmaskingOrder
from batchgen.strategies.dllm.rules.sequential import ONE_EACH, check_steps


@dataclass(frozen=True, slots=True, kw_only=True)
class LowConfidenceStatic(Rule):
    """Unmasks the most confident positions (LLaDA, arXiv 2502.09992; remasking_strategy
    `low_confidence_static` of generate.py in JetAstra/SDAR at 59549b13).

    Args:
        denoising_steps: see `Sequential`.
    """

    name: str = field(default="low_confidence_static", init=False)
    denoising_steps: int | None = None

    def __post_init__(self) -> None:
        check_steps(self.denoising_steps)

    def cut(self) -> Cut:
        return Cut(order=UnmaskingOrder.CONFIDENCE, steps=self.denoising_steps or ONE_EACH)
