"""Runs part of a captured forward concurrently with the rest, in a second CUDA stream.

A mixture of experts uses it to compute the shared expert concurrently with the routed experts.
`cuda_graph.py` provides the stream during a capture.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from typing import TypeVar

import torch
from torch import Tensor

MOST_TOKENS = 1024
"""The most tokens of a forward whose kernels leave room on the device for concurrent kernels."""

S = TypeVar("S")
T = TypeVar("T")
_side: ContextVar[torch.cuda.Stream | None] = ContextVar("_side", default=None)
"""The side stream of the capture that this thread is making; None outside captures."""


@contextmanager
def with_side_stream(stream: torch.cuda.Stream) -> Iterator[None]:
    """Let `beside` use this stream inside the context, in which one CUDA graph is captured."""
    token = _side.set(stream)
    try:
        yield
    finally:
        _side.reset(token)


def beside(
    x: Tensor, first: Callable[[Tensor], S], work: Callable[[Tensor], T]
) -> tuple[S, Callable[[], T]]:
    """Run `first(x)`, and run `work(x)` concurrently with it and with later launches, until the
    result is asked for.

    This happens only in the capture of a forward of few tokens. Otherwise the work runs when its
    result is asked for. The kernels and their results are the same in both cases.

    Args:
        x: [T, ...], the tokens. Until the result is asked for, the caller keeps everything that
            `work` reads, and does not write to it.
        first: launches a few kernels that others wait for. The device gets them before those of
            `work`, which may leave no multiprocessor free for later kernels.

    Returns:
        The result of `first`, and a function that returns the result of `work`. It must be called
            exactly once, because a capture cannot end before. Kernels launched after that call may
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

    # No tensor needs `record_stream`. Memory allocated in the side stream is reused only there, and
    # the side stream's next work waits for everything launched before it, including the readers of
    # this memory. The caller holds what `work` reads until the main stream waits for the side
    # stream.
    def join() -> T:
        main.wait_stream(side)
        return result

    return urgent, join
