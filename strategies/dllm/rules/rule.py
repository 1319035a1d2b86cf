"""The base class of unmasking rules: a rule's options, and the numbers that they mean for a row.

A denoise step of block diffusion draws a token at every masked position of a block. The row's rule
decides which of them are kept (unmasked). Each rule has a separate file in this folder.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass, field
from enum import IntEnum
from typing import ClassVar


class UnmaskingOrder(IntEnum):
    """The order of the masked positions."""

    POSITION = 0  # from left to right
    CONFIDENCE = 1  # decreasing confidence
    ENTROPY = 2  # increasing entropy


@dataclass(frozen=True, slots=True, kw_only=True)
class Cut:
    """Which of a row's drawn tokens a denoise step keeps, as numbers that a kernel reads.

    A masked position is unmasked if it is among the first `at_least` in the order, if its token's
    confidence is above `threshold`, or if the entropies of all positions before it sum to at most
    `bound`. Of equal positions, the first in the block comes first.
    """

    order: UnmaskingOrder
    steps: int = 0  # above 0: the number of steps of a block, from which `at_least` follows
    at_least: int = 1  # the fewest positions that a step unmasks
    threshold: float = float("inf")
    bound: float = -1.0  # negative: no position is unmasked because of its entropy
    # A known token is replaced if another one is drawn at its position with more confidence than
    # this.
    edit_threshold: float = float("inf")
    edit_steps: int = 0  # the most editing steps of a block in which nothing is masked


@dataclass(frozen=True, slots=True, kw_only=True)
class Rule(ABC):
    """An unmasking rule with its options. Raises ValueError, naming the option, for a value out of
    range.

    Attributes:
        name: the rule's name in `strategy.unmasking`.
        edits: whether the rule replaces tokens that it has unmasked.
    """

    name: str = field(init=False)
    edits: ClassVar[bool] = False

    @abstractmethod
    def cut(self) -> Cut:
        """Return the numbers of a row with this rule."""


def check_range(name: str, value: float, low: float, high: float, allowed: str) -> None:
    """Raise ValueError unless low <= value <= high. NaN is refused, too."""
    if not low <= value <= high:
        raise ValueError(f"{name} must be {allowed}, got {value!r}")
