"""The unmasking rule `entropy_bound`: a step unmasks as many positions as are nearly independent,
those with the lowest entropy first."""

from __future__ import annotations

from dataclasses import dataclass, field

from batchgen.strategies.dllm.rules.low_confidence_dynamic import check_floor
from batchgen.strategies.dllm.rules.rule import Cut, Rule, UnmaskingOrder, check_range


@dataclass(frozen=True, slots=True, kw_only=True)
class EntropyBound(Rule):
    """Unmasks the positions with the lowest entropies, as many as keep the sum of their entropies,
    without the largest, within a bound. The sum bounds how much the tokens depend on each other
    (Ben-Hamu et al. 2025, arXiv 2505.24857).

    The same rule is in `EntropyBoundSampler.accept_canvas` in
    models/diffusion_gemma/generation_diffusion_gemma.py of transformers 5.23, and in
    dllm/algorithm/eb_sampling.py of sgl-project/sglang at 38c8d9bc. `entropy_bounded` of the
    engines for SDAR includes the largest entropy in the sum, and so unmasks fewer positions.

    Args:
        entropy_bound: the bound in nats, for the distributions that tokens are drawn from.
        min_tokens_per_step: the fewest positions that a step unmasks, if as many are masked.
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
