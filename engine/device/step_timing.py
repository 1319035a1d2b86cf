"""Measures where the time of a run goes: prefill steps, decode steps, and the device's waits for
the host.

`LLMEngine` times each step with a `StepTimer`. Metrics and the costs of requests are computed from
the times.
"""

from __future__ import annotations

import time
from collections.abc import Iterable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from types import TracebackType
from typing import Literal, Protocol, Self

import torch

StepKind = Literal["prefill", "decode", "mixed", "images"]

_RING = 512
"""The number of steps whose timing marks are kept. An engine runs only a few steps ahead of its
device, so the device has passed a mark long before the mark is reused."""


@dataclass(frozen=True, slots=True)
class StepTime:
    """The time that one step took, in seconds."""

    kind: StepKind  # what the step did
    rows: int  # the number of rows in the step, or of images that were encoded before it
    # The device time from the step's first launch to the end of its last kernel. If the host
    # launches more slowly than the device works, this includes the device's waits within the step.
    seconds: float
    # The device time between the end of the previous step and the start of this one; 0 for the
    # first step.
    idle_before: float


@dataclass(frozen=True, slots=True)
class PhaseSplit:
    """Sums over the steps of a phase: the number of steps and of rows, and times in seconds."""

    steps: int
    rows: int
    seconds: float
    idle_before: float

    @classmethod
    def of(cls, steps: Iterable[StepTime]) -> Self:
        """Sum the times of these steps."""
        steps = list(steps)
        return cls(
            len(steps),
            sum(step.rows for step in steps),
            sum(step.seconds for step in steps),
            sum(step.idle_before for step in steps),
        )


class StepTimer:
    """Times the steps of an engine on its device's own clock, without waiting for the device.

    On a GPU an event is recorded before the first and after the last launch of each step. If the
    host is late, it enqueues the next step's first event late. So the time between the end of a
    step and the start of the next is the time that the device waited for the host. On a CPU the
    timer reads the host's clock.

        with timer.step("decode", rows=len(batch.seqs)):
            ...  # all launches of the step; not while a CUDA graph is captured

    Events are reused in a ring, so each step adds only one small record to the memory.
    """

    def __init__(self, device: torch.device) -> None:
        mark = _CudaMark if device.type == "cuda" else _HostMark
        self._starts: list[_Mark] = [mark() for _ in range(_RING)]
        self._ends: list[_Mark] = [mark() for _ in range(_RING)]
        self._labels: list[tuple[StepKind, int]] = []
        self._times: list[StepTime] = []  # the times of the first of `_labels`, already read
        self._taken = 0  # the number of steps before those of `_labels`

    def __len__(self) -> int:
        """Return the number of steps begun since the last `reset` and not taken yet."""
        return len(self._labels)

    def step(self, kind: StepKind, rows: int) -> Self:
        """Begin a step. Returns a context manager for its launches; these do not nest."""
        if len(self._labels) - len(self._times) == _RING - 1:
            # The ring is nearly full. Read the oldest step now, because the pause before it is
            # measured from the mark that is reused next.
            self._read_oldest()
        self._labels.append((kind, rows))
        return self

    def __enter__(self) -> None:
        self._starts[self._slot].record()

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self._ends[self._slot].record()

    def steps(self) -> list[StepTime]:
        """Return the times of all steps since the last `reset` that were not taken. Waits for steps
        that still run."""
        while len(self._times) < len(self._labels):
            self._read_oldest()
        return list(self._times)

    def take(self) -> StepTime:
        """Remove and return the time of the oldest step. Waits for the step if it still runs."""
        if not self._times:
            self._read_oldest()
        self._taken += 1
        del self._labels[0]
        return self._times.pop(0)

    def reset(self) -> None:
        """Drop the times of all steps."""
        self._labels.clear()
        self._times.clear()
        self._taken = 0

    @property
    def _slot(self) -> int:
        """The index in the ring of the newest step's marks."""
        return (self._taken + len(self._labels) - 1) % _RING

    def _read_oldest(self) -> None:
        """Read the marks of the oldest step not read yet. Waits for the step's end."""
        known = len(self._times)
        index = self._taken + known
        start, end = self._starts[index % _RING], self._ends[index % _RING]
        idle = self._ends[(index - 1) % _RING].seconds_until(start) if index else 0.0
        self._times.append(StepTime(*self._labels[known], start.seconds_until(end), idle))


def timed(
    timer: StepTimer | None, kind: StepKind, rows: int
) -> AbstractContextManager[None, bool | None]:
    """Return `timer.step(kind, rows)`, or a context that does nothing if there is no timer."""
    return nullcontext() if timer is None else timer.step(kind, rows)


class _Mark(Protocol):
    """A point in the device's work.

    `record` sets the mark after all work enqueued so far. `seconds_until` waits until the device
    has passed a later mark, and returns the seconds between the two.
    """

    def record(self) -> None: ...

    def seconds_until(self, later: Self) -> float: ...


class _CudaMark:
    """A mark in the work of a GPU: an event."""

    def __init__(self) -> None:
        self._event = torch.cuda.Event(enable_timing=True)

    def record(self) -> None:
        self._event.record()

    def seconds_until(self, later: Self) -> float:
        later._event.synchronize()
        milliseconds: float = self._event.elapsed_time(later._event)
        return milliseconds / 1e3


class _HostMark:
    """A mark in the work of a CPU: the host's clock when the mark is set."""

    def __init__(self) -> None:
        self._time = 0.0

    def record(self) -> None:
        self._time = time.perf_counter()

    def seconds_until(self, later: Self) -> float:
        return later._time - self._time
