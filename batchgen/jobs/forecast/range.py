"""The type of an estimate with bounds, `Range`, in which the forecast of a job gives its
figures."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Range:
    """An estimate: it will hardly be below `low` or above `bound`."""

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
        """All three figures times a factor."""
        return Range(*(value * factor for value in self))

    def plus(self, other: Range) -> Range:
        """Add another range figure by figure."""
        return Range(*(a + b for a, b in zip(self, other, strict=True)))
