"""What an unmasking rule is: its options, and the numbers that they mean for a row.

A denoise step of block diffusion draws a token at every masked position of a block, and the row's
rule decides which of them are kept (unmasked). Each rule has a file of its own in this folder.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass, field
from enum import IntEnum
from typing import ClassVar


class UnmaskingOrder(IntEnum):
    """Which of the masked positions come first."""

    POSITION = 0  # from left to right
    CONFIDENCE = 1  # the most confident first
    ENTROPY = 2  # those of the lowest entropy first


@dataclass(frozen=True, slots=True, kw_only=True)
class Cut:
    """What a denoise step keeps of a row's drawn tokens, in numbers that a kernel reads.

    A masked position is unmasked if it is among the first `at_least`, or if its token's confidence
    is above `threshold`, or if the entropies of all positions before it add up to at most `bound`.
    Of equal positions the first comes first.
    """

    order: UnmaskingOrder
    steps: int = 0  # > 0: the block takes so many steps, and this says what `at_least` is
    at_least: int = 1  # positions that a step unmasks in any case
    threshold: float = float("inf")
    bound: float = -1.0  # negative: no position is unmasked for its entropy
    # A known token is replaced by another that is drawn in its place with more confidence.
    edit_threshold: float = float("inf")
    edit_steps: int = 0  # the most steps that edit a block in which nothing is masked


@dataclass(frozen=True, slots=True, kw_only=True)
class Rule(ABC):
    """An unmasking rule with its options. A value out of range is a ValueError that names it.

    Attributes:
        name: the rule's name in `strategy.unmasking`.
        edits: whether the rule replaces tokens that it has unmasked.
    """

    name: str = field(init=False)
    edits: ClassVar[bool] = False

    @abstractmethod
    def cut(self) -> Cut:
        """The numbers of a row that has this rule."""


def check_range(name: str, value: float, low: float, high: float, allowed: str) -> None:
    """Raise ValueError unless the option's value is between both bounds; NaN is not."""
    if not low <= value <= high:
        raise ValueError(f"{name} must be {allowed}, got {value!r}")
