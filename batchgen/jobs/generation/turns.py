"""Jobs as generators of turns, so that one loop can run several jobs in one engine
(`run/run_jobs.py`).

A *turn* is what a job does between two values that its generator yields, such as queueing requests
or writing finished rows.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Generator
from contextlib import closing
from functools import partial
from typing import TypeVar

T = TypeVar("T")
Turns = Generator[float, None, T]
"""A job as a generator that returns its result.

It yields 0 to let other jobs go first, as it does before it asks their common engine for a step.
Otherwise it yields the seconds for which it has nothing to do.
"""


def alone(turns: Turns[T]) -> T:
    """Run one job that has its engine to itself; return its result."""
    while True:
        try:
            seconds = next(turns)
        except StopIteration as end:
            result: T = end.value
            return result
        if seconds:
            time.sleep(seconds)


def between(turns: Turns[T], look: Callable[[], None]) -> Turns[T]:
    """Call `look()` after every turn. Errors that `look` raises, and errors that the caller throws
    into this generator, are thrown into `turns`."""
    with closing(turns):
        take_turn: Callable[[], float] = partial(next, turns)
        while True:
            try:
                seconds = take_turn()
            except StopIteration as end:
                result: T = end.value
                return result
            take_turn = partial(next, turns)
            try:
                look()
                yield seconds
            except GeneratorExit:
                raise
            except BaseException as error:
                take_turn = partial(turns.throw, error)
