"""Chooses the captured size that a step is padded to, and when a new size is worth a capture.

`ForwardGraphs` has one `GraphChoice` for each kind of graph.
"""

from __future__ import annotations

from bisect import bisect_left, insort
from collections.abc import Sequence
from math import log2

WORTH_A_CAPTURE = 32.0
"""The amount of padding that costs as much as a capture, in doublings of a step's tokens.

A capture takes 0.1 to 0.2 s, during which the device waits. A memory-bound step takes 5 to 30 ms,
and about a quarter more for each doubling of its tokens, so a doubling costs about 5 ms.
"""


class GraphChoice:
    """The sizes of one kind of step: those that may be captured, and those that are.

    A step is padded to the smallest captured size that holds it. Once the padding since the last
    capture has cost about as much as a capture, the size that fits the current step is captured. So
    rare sizes are not captured, and whatever sizes come, padding costs no more than about the same
    time as captures.

    The choice depends only on the sizes of the steps so far, so ranks that run the same steps make
    the same choices.

    Args:
        sizes: the sizes that may be captured, ascending. The largest is always captured first,
            because all other graphs fit into its memory.
        concurrent_tokens: the number of tokens of a step besides those that `sizes` count.
    """

    def __init__(self, sizes: Sequence[int], concurrent_tokens: int = 0) -> None:
        self.sizes = sizes
        self._concurrent_tokens = concurrent_tokens
        self._captured: list[int] = []
        self._padding = 0.0

    def fitting(self, count: int) -> int:
        """Return the smallest size, captured or not, that holds a step of size `count`."""
        return self.sizes[bisect_left(self.sizes, count)]

    def choose(self, count: int) -> int:
        """Return the size to pad the next step to. The caller captures this size if it is not
        captured yet.

        Args:
            count: the size of the step.
        """
        fitting = self.fitting(count)
        if not self._captured:
            return self.sizes[-1]
        captured = self._captured[bisect_left(self._captured, fitting)]
        added = self._concurrent_tokens
        self._padding += log2((captured + added) / (fitting + added))
        return captured if self._padding < WORTH_A_CAPTURE else fitting

    def add(self, size: int) -> None:
        """Record that this size has been captured."""
        insort(self._captured, size)
        self._padding = 0.0
