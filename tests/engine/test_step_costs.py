"""What requests cost adds up to the seconds of all steps."""

from __future__ import annotations

import random
from collections import deque
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from batchgen.engine.device.step_timing import StepTime, StepTimer
from batchgen.engine.interface.engine_config import EngineConfig
from batchgen.engine.llm_engine import LLMEngine
from batchgen.engine.loading.loader import load_model
from batchgen.engine.rows.scheduled_batch import (
    DecodeBatch,
    MixedBatch,
    PrefillBatch,
)
from batchgen.engine.sampling.sampling_params import RequestParams
from batchgen.engine.step_costs import CostShares
from batchgen.strategies.ar.strategy import ARStrategy
from tests.support.engine.engine_rows import block_bytes, expect_short_rows

SLOTS = 4
NONE = np.empty(0, np.int64)


class FakeTimer:
    """A timer whose steps take 1, 2, 3, … seconds."""

    def __init__(self) -> None:
        self.taken = 0.0
        self._next = 1.0

    def take(self) -> StepTime:
        seconds, self._next = self._next, self._next + 1
        self.taken += seconds
        return StepTime("decode", 1, seconds, 0.0)


def costs_of(timer: FakeTimer) -> CostShares:
    return CostShares(timer, SLOTS)  # type: ignore[arg-type]


def prefill(rows: dict[int, str], lengths: list[int]) -> PrefillBatch:
    seqs: list[Any] = [SimpleNamespace(request_id=r, batch_slot=s) for s, r in rows.items()]
    return PrefillBatch(seqs, [0] * len(seqs), lengths, [], NONE, NONE, None)


def decode(slots: list[int], width: int) -> DecodeBatch:
    return DecodeBatch(np.array(slots), np.zeros(len(slots), np.int64), None, [], width, NONE)


def test_tokens_of_a_step_cost_alike() -> None:
    costs = costs_of(FakeTimer())
    costs.begin(prefill({0: "a", 1: "b"}, [30, 10]))  # 1 s
    costs.begin(MixedBatch(decode([0, 1], 2), prefill({2: "c"}, [16])))  # 2 s
    costs.begin(prefill({3: "d"}, [0]))  # 3 s; the prefix cache has had all of it
    costs.begin(decode([0, 2], 1))  # 4 s
    for name in "abcd":
        costs.end(name)
    costs.share(leave=0)
    assert dict(costs.take()) == pytest.approx(
        {"a": 0.75 + 0.2 + 2, "b": 0.25 + 0.2, "c": 1.6 + 2, "d": 3.0}
    )
    assert costs.take() == []


def test_a_row_pays_for_the_step_that_was_launched_before_its_end_was_known() -> None:
    costs = costs_of(FakeTimer())
    costs.begin(prefill({0: "a"}, [5]))
    costs.begin(decode([0], 1))
    costs.share(leave=1)
    costs.end("a")
    costs.begin(prefill({0: "b"}, [5]))  # another row has its slot
    assert costs.take() == []
    costs.share(leave=1)
    assert costs.take() == [("a", 3.0)]
    costs.end("b")
    costs.end("never begun")
    costs.share(leave=0)
    assert costs.take() == [("b", 3.0)]


@given(st.data())
def test_costs_add_up_however_rows_come_and_go(data: st.DataObject) -> None:
    """Rows join, decode, are preempted and read again, and end, with steps shared late."""
    timer = FakeTimer()
    costs, total, made, running = costs_of(timer), 0.0, 0, dict[int, str]()
    waiting: deque[str] = deque()
    seen: set[str] = set()
    for _ in range(data.draw(st.integers(1, 25))):
        free = [slot for slot in range(SLOTS) if slot not in running]
        joining: dict[int, str] = {}
        for slot in free[: data.draw(st.integers(0, SLOTS))]:
            if not waiting:
                made += 1
                waiting.append(f"r{made}")
            joining[slot] = waiting.popleft()
        lengths = [data.draw(st.integers(0, 9)) for _ in joining]
        parts: list[Any] = []
        if running:
            parts.append(decode(list(running), data.draw(st.integers(1, 5))))
        if joining:
            parts.append(prefill(joining, lengths))
        if parts:
            costs.begin(MixedBatch(*parts) if len(parts) == 2 else parts[0])
        running |= joining
        seen |= set(joining.values())
        for slot in list(running):
            match data.draw(st.integers(0, 5)):
                case 0:
                    costs.end(running.pop(slot))
                case 1:
                    waiting.appendleft(running.pop(slot))  # preempted
        costs.share(leave=data.draw(st.integers(0, 3)))
        for name, seconds in costs.take():
            seen.remove(name)
            total += seconds
    for name in [*running.values(), *waiting]:
        costs.end(name)
    costs.share(leave=0)
    for name, seconds in costs.take():
        seen.remove(name)
        total += seconds
    assert not seen
    assert total == pytest.approx(timer.taken, abs=1e-6)


@pytest.mark.quick(1)
@pytest.mark.parametrize("overlap", [False, True])
@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
def test_costs_of_an_engine_add_up_to_its_steps(
    tiny_model: Callable[..., Path], monkeypatch: pytest.MonkeyPatch, overlap: bool, device: str
) -> None:
    """With rows that are preempted, cut into chunks, found in the prefix cache and aborted."""
    expect_short_rows(monkeypatch)
    model = load_model(tiny_model("llama"), device=torch.device(device), dtype=torch.float32)
    gib = 44 * block_bytes(1, model) / 2**30
    config = replace(
        EngineConfig(max_num_seqs=64, max_batched_tokens=24, chunk_tokens=16, block_size=4),
        kv_cache_gib=gib,
        overlap=overlap,
    )
    engine, steps = LLMEngine(model, None, (7,), ARStrategy(), config), list[float]()
    take = StepTimer.take

    def taken(timer: StepTimer) -> StepTime:
        steps.append((time := take(timer)).seconds)
        return time

    monkeypatch.setattr(StepTimer, "take", taken)
    engine.measure_costs()
    rng = random.Random(0)
    costs: dict[str, float] = {}
    for i in range(12):
        prompt = [*range(1, rng.randint(2, 9)), rng.randrange(10, 100)]
        engine.add_request(str(i), prompt, RequestParams(max_new_tokens=16, temperature=0.0))
    for number in range(10_000):
        if not engine.has_unfinished():
            break
        engine.step()
        if number == 6:
            assert engine.abort("3")
        for name, seconds in engine.take_costs():
            assert name not in costs and seconds > 0
            costs[name] = seconds
    costs.update(engine.take_costs(wait=True))
    assert engine.stats.preemptions > 0
    assert set(costs) == {str(i) for i in range(12)}
    assert len(steps) >= engine.stats.decode_steps
    assert sum(costs.values()) == pytest.approx(sum(steps), abs=1e-6)
