"""Which rows start where there are more adapters than adapter slots."""

from __future__ import annotations

import random
from collections import deque
from typing import cast

from hypothesis import given, settings
from hypothesis import strategies as st

from batchgen.engine.rows.running_batch import RunningBatch
from batchgen.engine.rows.sequence import Sequence
from batchgen.engine.rows.stopping import StopRule
from batchgen.engine.sampling.sampling_params import RequestParams
from batchgen.engine.scheduling.adapter_slots import AdapterSlots


class Running:
    """The running rows, each with the steps that it runs on."""

    def __init__(self) -> None:
        self.left: dict[Sequence, int] = {}

    @property
    def rows(self) -> list[Sequence]:
        return list(self.left)

    def step(self) -> None:
        self.left = {seq: steps - 1 for seq, steps in self.left.items() if steps > 1}


def row(adapter: int) -> Sequence:
    rule = StopRule({}, (), 0, 9)
    return Sequence(adapter, [5], RequestParams(), rule, (), adapter=adapter)


@settings(max_examples=25)
@given(st.integers(1, 4), st.integers(1, 3), st.integers(1, 6), st.integers(0, 9), st.data())
def test_rows_start_in_turn(
    num_slots: int, more: int, rows: int, patience: int, data: st.DataObject
) -> None:
    """Rows in flight have no more adapters than there are slots, a slot gets another adapter once
    no row has the one before it, and no row waits for ever."""
    draw = random.Random(data.draw(st.integers(0, 2**32)))
    number = num_slots + more
    slots, fake = AdapterSlots(number, num_slots, patience), Running()
    running = cast(RunningBatch, fake)
    waiting: deque[Sequence] = deque()
    in_slots = dict(zip(range(1, num_slots + 1), range(1, num_slots + 1), strict=True))
    passed: dict[Sequence, int] = {}
    for _ in range(60):
        while len(waiting) < 30:
            # Nearly all rows have adapters that are in slots already.
            common = draw.random() < 0.9
            waiting.append(row(draw.randint(0, num_slots if common else number)))
        while len(fake.left) < rows and (seq := next(slots.startable(waiting, running), None)):
            before = {one.lora_slot for one in fake.left} - {0}
            slots.start(seq, running, is_first=seq is waiting[0])
            for slot, adapter in slots.take_loads():
                assert slot not in before
                in_slots[slot] = adapter
            assert in_slots.get(seq.lora_slot, 0) == seq.adapter
            for one in waiting:
                if one is seq:
                    break
                passed[one] = passed.get(one, 0) + 1
            waiting.remove(seq)
            fake.left[seq] = draw.randint(1, 9)
            assert len({one.adapter for one in fake.left} - {0}) <= num_slots
        fake.step()
    # Each of up to 30 rows before a row may be passed by so many before its adapter gets a slot.
    assert max(passed.values(), default=0) <= 30 * (patience + 9 * rows + 1)


def test_rows_behind_a_waiting_one_start_a_limited_number_of_times() -> None:
    """The rows of a slot never all end at once."""
    slots, fake = AdapterSlots(2, 1, 10), Running()
    running = cast(RunningBatch, fake)
    waiting = deque([row(1), row(2), *(row(1) for _ in range(50))])
    order = []
    for step in range(200):
        if len(fake.left) < 2 and (seq := next(slots.startable(waiting, running), None)):
            slots.start(seq, running, is_first=seq is waiting[0])
            waiting.remove(seq)
            fake.left[seq] = 2 + 2 * (step > 0)
            order.append(seq.adapter)
        fake.step()
    assert order.index(2) == 12 and len(order) == 52


def test_all_adapters_fit() -> None:
    slots, fake = AdapterSlots(3, 3, 0), Running()
    waiting = [row(number) for number in (3, 1, 0, 2)]
    assert list(slots.startable(waiting, cast(RunningBatch, fake))) == waiting
    for seq in waiting:
        slots.start(seq, cast(RunningBatch, fake), is_first=False)
        assert seq.lora_slot == seq.adapter
    assert slots.take_loads() == []
