"""Chooses which captured size a step is padded to, and when a size is worth a capture of its own.
`ForwardGraphs` has one such choice for each kind of graph."""

from __future__ import annotations

from bisect import bisect_left, insort
from collections.abc import Sequence
from math import log2

WORTH_A_CAPTURE = 32.0
"""How much padding costs as much as a capture, in doublings of a step's tokens.

A capture takes 0.1 to 0.2 s, in which the device waits. A step that is bound by memory takes 5 to
30 ms and about a quarter more for each doubling of its tokens, so a doubling costs some 5 ms.
"""


class GraphChoice:
    """The sizes of one kind of step: those that are captured, and the one that a step is padded to.

    A step is padded to the smallest captured size that holds it. Once the padding of the steps
    since the last capture has cost about as much as a capture, the size that fits the step is
    captured. So sizes that only a few steps have do not cost a capture each, and whatever sizes
    come, the padding costs about as much as the captures, and no more.

    The choice depends on the sizes of the steps so far and on nothing else: ranks that make the
    same steps choose the same. `sizes` may be captured, ascending. The largest one is always
    captured first, because the memory that it takes holds all others.
    """

    def __init__(self, sizes: Sequence[int], concurrent_tokens: int = 0) -> None:
        self.sizes = sizes
        self._beside = concurrent_tokens
        self._captured: list[int] = []
        self._padding = 0.0

    def fitting(self, count: int) -> int:
        """Return the smallest size, captured or not, that holds a step of size `count`."""
        return self.sizes[bisect_left(self.sizes, count)]

    def choose(self, count: int) -> int:
        """Return the size that the next step, which is of size `count`, is padded to. The caller
        captures it first if it is not captured yet."""
        fitting = self.fitting(count)
        if not self._captured:
            return self.sizes[-1]
        padded = self._captured[bisect_left(self._captured, fitting)]
        self._padding += log2((padded + self._beside) / (fitting + self._beside))
        return padded if self._padding < WORTH_A_CAPTURE else fitting

    def add(self, size: int) -> None:
        """Note that this size has been captured."""
        insort(self._captured, size)
        self._padding = 0.0
