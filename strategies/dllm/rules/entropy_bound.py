"""The unmasking rule `entropy_bound`: a step unmasks as many positions as are nearly independent of
each other, those of the lowest entropy first."""

from __future__ import annotations

from dataclasses import dataclass, field

from batchgen.strategies.dllm.rules.low_confidence_dynamic import check_floor
from batchgen.strategies.dllm.rules.rule import Cut, Rule, UnmaskingOrder, check_range


@dataclass(frozen=True, slots=True, kw_only=True)
class EntropyBound(Rule):
    """The positions of the lowest entropies, as many as keep the sum of their entropies without the
    largest within a bound: that sum bounds what the tokens say of each other (Ben-Hamu et al. 2025,
    arXiv 2505.24857).

    So do `EntropyBoundSampler.accept_canvas` in models/diffusion_gemma/
    generation_diffusion_gemma.py of transformers 5.23 and dllm/algorithm/eb_sampling.py of
    sgl-project/sglang at 38c8d9bc. `entropy_bounded` of the engines for SDAR counts the largest
    entropy, too, and so takes fewer.

    Args:
        entropy_bound: in nats, of the distributions that tokens are drawn from.
        min_tokens_per_step: the fewest positions that a step unmasks, if they are masked.
    """

    name: str = field(default="entropy_bound", init=False)
    entropy_bound: float = 0.1
    min_tokens_per_step: int = 1

    def __post_init__(self) -> None:
        allowed = "at least 0 and finite"
        check_range("entropy_bound", self.entropy_bound, 0, 1e30, allowed)
        check_floor(self.min_tokens_per_step)

    def cut(self) -> Cut:
        return Cut(
            order=UnmaskingOrder.ENTROPY,
            at_least=self.min_tokens_per_step,
            bound=self.entropy_bound,
        )
