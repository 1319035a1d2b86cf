"""Runs some work of a captured forward beside its other work, in a second CUDA stream.

A mixture of experts uses it: the experts that every token goes through are computed beside those
that a router chooses. `cuda_graph.py` provides the stream while it captures.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from typing import TypeVar

import torch
from torch import Tensor

MOST_TOKENS = 1024
"""The most tokens of a forward whose kernels leave room on the device for others beside them."""

S = TypeVar("S")
T = TypeVar("T")
_side: ContextVar[torch.cuda.Stream | None] = ContextVar("_side", default=None)
"""The second stream of the capture that this thread makes; None outside of captures."""


@contextmanager
def with_side_stream(stream: torch.cuda.Stream) -> Iterator[None]:
    """Let `beside` use this stream within the context, in which one CUDA graph is captured."""
    token = _side.set(stream)
    try:
        yield
    finally:
        _side.reset(token)


def beside(
    x: Tensor, first: Callable[[Tensor], S], work: Callable[[Tensor], T]
) -> tuple[S, Callable[[], T]]:
    """Do `first(x)` and begin `work(x)`, to be done beside it and beside what is launched until its
    result is asked for.

    That is so in the capture of a forward of few tokens. Anywhere else nothing is begun, and the
    work is done when its result is asked for. The kernels and their results are the same.

    Args:
        x: [T, ...], the tokens. The caller keeps all that the work reads, and writes nothing to it,
            until the result is asked for.
        first: launches the kernels that others wait for, few of them. The device gets them before
            those of the work, which may leave no multiprocessor for what comes after them.

    Returns:
        The result of `first`, and a function that returns the result of the work, to be called
        exactly once: a capture in which it is not called cannot end. What is launched after it may
        read the result.
    """
    side = _side.get()
    if side is None or len(x) > MOST_TOKENS:
        return first(x), lambda: work(x)
    main = torch.cuda.current_stream(x.device)
    fork = main.record_event()
    urgent = first(x)
    side.wait_event(fork)
    with torch.cuda.stream(side):
        result = work(x)

    # No tensor needs `record_stream`: memory of those made here is given to this stream alone, and
    # its next work waits for all that was launched before that, so for what reads them. The caller
    # holds what the work reads until the other stream waits for it.
    def join() -> T:
        main.wait_stream(side)
        return result

    return urgent, join
