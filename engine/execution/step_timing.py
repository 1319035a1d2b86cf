"""Where the time of a run goes: prefill steps, decode steps, the device waiting for the host."""

from __future__ import annotations

import time
from collections.abc import Iterable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from types import TracebackType
from typing import Literal, Protocol, Self

import torch

StepKind = Literal["prefill", "decode", "mixed"]

_RING = 512
"""Steps whose marks are kept. An engine runs ahead of its device by a few at most, so a mark was
passed long before it is read and used again."""


@dataclass(frozen=True, slots=True)
class StepTime:
    """Attributes:
    rows: sequences in the step.
    seconds: device time from its first launch to the end of its last. Where the host launches
        slower than the device works, the device's waits within the step are part of it.
    idle_before: device time between the end of the step before and this one; 0 for the first.
    """

    kind: StepKind
    rows: int
    seconds: float
    idle_before: float


@dataclass(frozen=True, slots=True)
class PhaseSplit:
    """Sums over steps, in seconds."""

    steps: int
    rows: int
    seconds: float
    idle_before: float

    @classmethod
    def of(cls, steps: Iterable[StepTime]) -> Self:
        steps = list(steps)
        return cls(
            len(steps),
            sum(step.rows for step in steps),
            sum(step.seconds for step in steps),
            sum(step.idle_before for step in steps),
        )


class StepTimer:
    """Times the steps of an engine on its device's own clock, without waiting for it.

    On a GPU an event is recorded before the first and after the last launch of each step. One that
    a late host enqueues late also completes late, so from the end of a step to the start of the
    next the device had nothing to do because of the host. On a CPU it reads the host's clock.

        with timer.step("decode", rows=len(batch.seqs)):
            ...  # all launches of the step; not while a CUDA graph is captured

    Marks are drawn from a ring: memory grows by one small record per step and by no event.
    """

    def __init__(self, device: torch.device) -> None:
        mark = _CudaMark if device.type == "cuda" else _HostMark
        self._starts: list[_Mark] = [mark() for _ in range(_RING)]
        self._ends: list[_Mark] = [mark() for _ in range(_RING)]
        self._labels: list[tuple[StepKind, int]] = []
        self._times: list[StepTime] = []  # of the steps whose marks were read

    def __len__(self) -> int:
        """Steps begun since the last `reset`."""
        return len(self._labels)

    def step(self, kind: StepKind, rows: int) -> Self:
        """A context for the launches of one step; contexts do not nest."""
        if len(self._labels) - len(self._times) == _RING - 1:
            self._read_oldest()  # the pause before it begins with the mark used next
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
        """All steps since the last `reset`; waits for those still running."""
        while len(self._times) < len(self._labels):
            self._read_oldest()
        return list(self._times)

    def reset(self) -> None:
        """Forget all steps."""
        self._labels.clear()
        self._times.clear()

    @property
    def _slot(self) -> int:
        return (len(self._labels) - 1) % _RING

    def _read_oldest(self) -> None:
        index = len(self._times)
        start, end = self._starts[index % _RING], self._ends[index % _RING]
        idle = self._ends[(index - 1) % _RING].seconds_until(start) if index else 0.0
        self._times.append(StepTime(*self._labels[index], start.seconds_until(end), idle))


def timed(
    timer: StepTimer | None, kind: StepKind, rows: int
) -> AbstractContextManager[None, bool | None]:
    """`timer.step(kind, rows)`, or a context that does nothing without a timer."""
    return nullcontext() if timer is None else timer.step(kind, rows)


class _Mark(Protocol):
    def record(self) -> None: ...

    def seconds_until(self, later: Self) -> float: ...


class _CudaMark:
    def __init__(self) -> None:
        self._event = torch.cuda.Event(enable_timing=True)

    def record(self) -> None:
        self._event.record()

    def seconds_until(self, later: Self) -> float:
        later._event.synchronize()
        milliseconds: float = self._event.elapsed_time(later._event)
        return milliseconds / 1e3


class _HostMark:
    def __init__(self) -> None:
        self._time = 0.0

    def record(self) -> None:
        self._time = time.perf_counter()

    def seconds_until(self, later: Self) -> float:
        return later._time - self._time
