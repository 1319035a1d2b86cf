"""A figure that is not known yet."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Range:
    """A figure that is not known yet: hardly below `low`, hardly above `bound`."""

    low: float
    likely: float
    bound: float

    @classmethod
    def exactly(cls, value: float) -> Range:
        """The range of a figure that is known."""
        return cls(value, value, value)

    def __iter__(self) -> Iterator[float]:
        return iter((self.low, self.likely, self.bound))

    def times(self, factor: float) -> Range:
        """All three times a factor."""
        return Range(*(value * factor for value in self))

    def plus(self, other: Range) -> Range:
        """The sums of both."""
        return Range(*(one + more for one, more in zip(self, other, strict=True)))
