"""Jobs as generators of turns, so that one loop can run several of them beside each other."""

from __future__ import annotations

import time
from collections.abc import Generator
from typing import TypeVar

T = TypeVar("T")
Turns = Generator[float, None, T]
"""What a job does until it has its result. It yields 0 where its requests need a step of the
engine, and else for how many seconds it has nothing to do."""


def alone(turns: Turns[T]) -> T:
    """The result of turns that nothing else runs beside."""
    while True:
        try:
            seconds = next(turns)
        except StopIteration as end:
            result: T = end.value
            return result
        if seconds:
            time.sleep(seconds)
