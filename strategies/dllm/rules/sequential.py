"""The unmasking rule `sequential`: positions are unmasked from left to right, and a block in a
fixed number of steps."""

from __future__ import annotations

from dataclasses import dataclass, field

from batchgen.strategies.dllm.rules.rule import Cut, Rule, UnmaskingOrder, check_range

ONE_EACH = 64
"""As many steps as the longest block has positions, so that each step unmasks one."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Sequential(Rule):
    """Unmasks the first masked positions (remasking_strategy `sequential` of generate.py in
    JetAstra/SDAR at 59549b13).

    Args:
        denoising_steps: the number of steps of a block. Its positions are divided among them as
            evenly as possible, larger shares first; None: one step per position.
    """

    name: str = field(default="sequential", init=False)
    denoising_steps: int | None = None

    def __post_init__(self) -> None:
        check_steps(self.denoising_steps)

    def cut(self) -> Cut:
        return Cut(order=UnmaskingOrder.POSITION, steps=self.denoising_steps or ONE_EACH)


def check_steps(steps: int | None) -> None:
    """Raise ValueError if a block cannot take this number of steps."""
    check_range("denoising_steps", 1 if steps is None else steps, 1, float("inf"), "at least 1")
