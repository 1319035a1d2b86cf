"""The step timer, on a clock that the test moves and on a GPU."""

import time
from itertools import pairwise

import pytest
import torch

from batchgen.engine.device import step_timing
from batchgen.engine.device.step_timing import PhaseSplit, StepKind, StepTimer, timed


class Clock:
    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.now = 100.0
        monkeypatch.setattr(time, "perf_counter", lambda: self.now)

    def run(self, timer: StepTimer, kind: StepKind, rows: int, seconds: float) -> None:
        with timer.step(kind, rows):
            self.now += seconds


def cpu_timer() -> StepTimer:
    return StepTimer(torch.device("cpu"))


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    return Clock(monkeypatch)


def test_steps_and_the_pauses_between_them(clock: Clock) -> None:
    timer = cpu_timer()
    clock.run(timer, "prefill", 3, 2.0)
    clock.now += 0.5
    clock.run(timer, "decode", 3, 1.0)
    clock.run(timer, "decode", 2, 0.25)
    clock.now += 7.0
    assert len(timer) == 3
    prefill, first, second = timer.steps()
    assert (prefill.kind, prefill.rows, prefill.seconds, prefill.idle_before) == (
        "prefill",
        3,
        2.0,
        0.0,
    )
    assert (first.seconds, first.idle_before) == (1.0, 0.5)
    assert (second.rows, second.seconds, second.idle_before) == (2, 0.25, 0.0)
    assert PhaseSplit.of([first, second]) == PhaseSplit(2, 5, 1.25, 0.5)


def test_reading_in_between_loses_nothing(clock: Clock) -> None:
    timer = cpu_timer()
    clock.run(timer, "decode", 1, 1.0)
    assert len(timer.steps()) == 1
    clock.now += 3.0
    clock.run(timer, "decode", 1, 2.0)
    assert [(s.seconds, s.idle_before) for s in timer.steps()] == [(1.0, 0.0), (2.0, 3.0)]


def test_marks_are_used_again_without_mixing_steps(
    clock: Clock, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(step_timing, "_RING", 4)
    timer = cpu_timer()
    for i in range(1, 30):
        clock.now += i / 8
        clock.run(timer, "decode", i, float(i))
        if i == 13:
            timer.steps()
    steps = timer.steps()
    assert [s.rows for s in steps] == list(range(1, 30))
    assert all(s.seconds == s.rows for s in steps)
    assert steps[0].idle_before == 0
    assert all(s.idle_before == s.rows / 8 for s in steps[1:])


def test_reset_forgets_steps_and_the_pause_before_the_next(clock: Clock) -> None:
    timer = cpu_timer()
    clock.run(timer, "decode", 1, 1.0)
    timer.reset()
    assert len(timer) == 0 and timer.steps() == []
    clock.now += 3.0
    clock.run(timer, "prefill", 2, 2.0)
    (step,) = timer.steps()
    assert (step.rows, step.seconds, step.idle_before) == (2, 2.0, 0.0)


def test_a_step_that_fails_is_closed(clock: Clock) -> None:
    timer = cpu_timer()
    with pytest.raises(KeyError), timer.step("decode", 1):
        clock.now += 1.0
        raise KeyError
    assert timer.steps()[0].seconds == 1.0


def test_without_a_timer_nothing_happens(clock: Clock) -> None:
    with timed(None, "decode", 1):
        clock.now += 1.0
    timer = cpu_timer()
    with timed(timer, "decode", 1):
        clock.now += 1.0
    assert len(timer) == 1


@pytest.mark.gpu
def test_on_a_gpu_a_late_host_shows_as_idle_time() -> None:
    device = torch.device("cuda")
    timer = StepTimer(device)
    x = torch.randn(2048, 2048, device=device)
    for pause in (0.0, 0.0, 0.02, 0.0):
        torch.cuda.synchronize()
        time.sleep(pause)
        for _ in range(3):
            with timer.step("decode", 1):
                for _ in range(20):
                    x @ x
    steps = timer.steps()
    late = [i for i, step in enumerate(steps) if step.idle_before > 0.015]
    assert late == [6]
    assert all(step.seconds > 0 for step in steps)


@pytest.mark.gpu
def test_on_a_gpu_more_steps_than_marks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(step_timing, "_RING", 8)
    timer = StepTimer(torch.device("cuda"))
    x = torch.ones(1, device="cuda")
    for rows in range(100):
        with timer.step("decode", rows):
            x += 1
    steps = timer.steps()
    assert all(b.rows == a.rows + 1 for a, b in pairwise(steps)) and len(steps) == 100
    assert all(step.seconds > 0 and step.idle_before >= 0 for step in steps)


def test_steps_that_were_taken_are_forgotten(clock: Clock, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(step_timing, "_RING", 4)
    timer = cpu_timer()
    for i in range(1, 30):
        clock.now += i / 8
        clock.run(timer, "decode", i, float(i))
        if i > 2:
            step = timer.take()
            assert (step.rows, step.seconds, step.idle_before) == (
                i - 2,
                i - 2,
                (i > 3) * step.rows / 8,
            )
    assert [s.rows for s in timer.steps()] == [28, 29]
    assert len(timer) == 2
