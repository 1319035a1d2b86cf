"""RunningBatch.commit against one plain Python object per row that takes its tokens one by one."""

from __future__ import annotations

import random
from collections import deque
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, cast

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from transformers import PreTrainedTokenizerBase

from batchgen.engine.interface.outputs import HostOutput, OutputColumn
from batchgen.engine.rows.running_batch import RunningBatch
from batchgen.engine.rows.sequence import Sequence
from batchgen.engine.rows.stopping import IncrementalDecoder, StopRule
from batchgen.engine.sampling.sampling_params import RequestParams

PIECES = ("a", "b", "ab", "ba", "c", "", "abc", "b", "x", "y", "z", "w")
STRINGS = ("ab", "ca", "bb", "aab", "abcab", "c")
SCORE, PICKS = "score", "picks"


class PiecesTokenizer:
    """Token i spells PIECES[i], whatever is around it."""

    def decode(self, ids: list[int], **_: bool) -> str:
        return "".join(PIECES[i] for i in ids)


def value(row: int, place: int, element: int) -> int:
    """A column at a generated token's place; no two places of any two rows share one."""
    return (row * 1000 + place) * 10 + element


@dataclass(eq=False)
class PlainRow:
    """What the table must know of a row, kept by the simplest means.

    Attributes:
        seq: the row in the table.
        picks: width of its column PICKS; 0 does not ask for it.
        life: changes whenever the row leaves the table, and what was launched before is void.
        output: its committed tokens.
        device_tokens: how many the launched steps will have produced.
        outcome: (finish_reason, stop, text before the stop string) once it ended.
    """

    number: int
    seq: Sequence
    picks: int
    life: int = 0
    output: list[int] = field(default_factory=list)
    device_tokens: int = 0
    outcome: tuple[str, str | None, str | None] | None = None

    def commit(self, token_ids: list[int], failed: bool) -> int:
        """Returns how many tokens the row keeps."""
        for count, token_id in enumerate(token_ids, start=1):
            before = self._text()
            self.output.append(token_id)
            self.outcome = self._outcome(before)
            if self.outcome is not None:
                return count
        if failed:
            self.outcome = ("error", None, None)
        return len(token_ids)

    def _text(self) -> str:
        return "".join(PIECES[i] for i in self.output)

    def _outcome(self, before: str) -> tuple[str, str | None, str | None] | None:
        stop, text = self.seq.stop, self._text()
        if len(self.output) >= stop.min_new_tokens:
            if self.output[-1] in stop.stop_ids:
                return "stop", stop.stop_ids[self.output[-1]], None
            matches = [
                (end - len(string), string)
                for end in range(len(before) + 1, len(text) + 1)
                for string in stop.strings
                if text[:end].endswith(string)
            ]
            if matches:
                start, string = min(matches)
                return "stop", string, text[:start]
        if len(self.output) >= stop.max_new_tokens:
            return "length", None, None
        return None


@dataclass
class Launch:
    """A step on its way: what it will bring, and for which lives of which rows."""

    rows: list[tuple[PlainRow, int]]
    slots: np.ndarray[Any, np.dtype[np.int64]]
    epochs: np.ndarray[Any, np.dtype[np.int64]]
    output: HostOutput


class World:
    """Rows that come, decode, are preempted, aborted and end while steps are in flight."""

    def __init__(self, rng: random.Random, *, capacity: int, width: int, longest: int) -> None:
        self.rng = rng
        self.width = width
        self.longest = longest
        self.table = RunningBatch(capacity)
        self.capacity = capacity
        self.running: list[PlainRow] = []
        self.preempted: list[PlainRow] = []
        self.ended: list[PlainRow] = []
        self.in_flight: deque[Launch] = deque()
        self.num_rows = 0
        self.num_committed = 0

    def new_row(self) -> PlainRow:
        rng = self.rng
        ids = rng.sample(range(6, len(PIECES)), rng.choice([0, 0, 0, 1, 1, 3]))
        strings = tuple(rng.sample(STRINGS, rng.choice([0, 0, 0, 1, 3])))
        max_new = rng.randint(1, self.longest)
        decoder = None
        if strings:
            decoder = IncrementalDecoder(cast(PreTrainedTokenizerBase, PiecesTokenizer()))
        stop = StopRule(
            {i: f"<{i}>" for i in ids},
            strings,
            rng.choice([0, 0, rng.randint(0, max_new)]),
            max_new,
            decoder,
        )
        columns = [OutputColumn(SCORE, np.dtype(np.int32))] if rng.random() < 0.5 else []
        picks = rng.choice([0, 1, 2, 4])
        if picks:
            columns.append(OutputColumn(PICKS, np.dtype(np.int64), (picks,)))
        self.num_rows += 1
        prompt = [rng.randrange(100) for _ in range(rng.randint(1, 5))]
        seq = Sequence(str(self.num_rows), prompt, RequestParams(), stop, tuple(columns))
        return PlainRow(self.num_rows, seq, picks)

    def add_rows(self) -> None:
        """Some rows begin: their first step is launched with their coming. Others begin again, and
        go on from the token that they have."""
        coming = []
        while len(self.running) < self.capacity and self.rng.random() < 0.6:
            again = self.preempted and self.rng.random() < 0.7
            row = self.preempted.pop() if again else self.new_row()
            row.seq.prefill_yields = not row.seq.resumed
            row.seq.num_prefill_tokens = row.seq.num_tokens - row.seq.resumed
            row.seq.num_computed_tokens = row.seq.num_prefill_tokens
            self.table.add(row.seq, reserved=17)
            self.table.end_prefill(row.seq, reserved=17)
            row.device_tokens = len(row.output)
            self.running.append(row)
            if not row.seq.resumed:
                coming.append(row)
        if coming:
            self._launch(coming)

    def decode(self) -> None:
        staying = [row for row in self.running if not self._ends_by_length(row)]
        slots = self._slots(self.running)
        expected = [self._ends_by_length(row) for row in self.running]
        assert self.table.ends_by_length(slots).tolist() == expected
        self.table.launched[self._slots(staying)] += 1
        self._launch(staying)

    def _ends_by_length(self, row: PlainRow) -> bool:
        launched = sum((row, row.life) in launch.rows for launch in self.in_flight)
        return len(row.output) + launched >= row.seq.stop.max_new_tokens

    def _slots(self, rows: list[PlainRow]) -> np.ndarray[Any, np.dtype[np.int64]]:
        return np.array([row.seq.batch_slot for row in rows], np.int64)

    def _launch(self, rows: list[PlainRow]) -> None:
        rng = self.rng
        slots = self._slots(rows)
        token_ids = np.full((len(rows), self.width), rng.randrange(len(PIECES)), np.int64)
        failed = np.array([rng.random() < 0.01 for _ in rows], np.bool_)
        counts = [0 if bad else rng.choice([*range(self.width + 1), 1]) for bad in failed]
        asked = {name for row in rows for name in row.seq.columns}
        tails = {SCORE: (), PICKS: (max((row.picks for row in rows), default=0),)}
        columns = {
            name: np.full((len(rows), self.width, *tails[name]), -1, dtype)
            for name, dtype in ((SCORE, np.int32), (PICKS, np.int64))
            if name in asked
        }
        for i, (row, count) in enumerate(zip(rows, counts, strict=True)):
            for j in range(count):
                token_ids[i, j] = rng.randrange(len(PIECES))
                for values in columns.values():
                    flat = values[i, j].reshape(-1)
                    flat[:] = [
                        value(row.number, row.device_tokens + j, e) for e in range(len(flat))
                    ]
                    values[i, j] = flat.reshape(values[i, j].shape)
            row.device_tokens += count
        output = HostOutput(np.array(counts, np.int32), token_ids, failed, columns)
        lives = [(row, row.life) for row in rows]
        self.in_flight.append(Launch(lives, slots, self.table.epochs[slots], output))

    def commit(self) -> None:
        launch = self.in_flight.popleft()
        expected = []
        for (row, life), ids, count, failed in zip(
            launch.rows,
            launch.output.token_ids.tolist(),
            launch.output.num_tokens.tolist(),
            launch.output.failed.tolist(),
            strict=True,
        ):
            if row.life == life:
                self.num_committed += row.commit(ids[:count], failed)
                if row.outcome is not None:
                    expected.append(row)
        finished = self.table.commit(launch.slots, launch.epochs, launch.output)
        assert finished == [row.seq for row in expected]
        for row in expected:
            assert row.seq.finish_reason is not None
            self._leave(row)
            self.ended.append(row)
            self._check_outcome(row)

    def drop(self, row: PlainRow, again: bool) -> None:
        self._leave(row)
        if again:
            self.preempted.append(row)

    def _leave(self, row: PlainRow) -> None:
        """Whatever the reason, the Sequence then has all that was committed."""
        slot = row.seq.batch_slot
        self.table.remove(row.seq)
        self.running.remove(row)
        row.life += 1
        assert row.seq.batch_slot is None and slot is not None and not self.table.occupied[slot]
        assert row.seq.token_ids[row.seq.num_prompt_tokens :] == row.output
        if row.output:
            assert row.seq.num_computed_tokens == row.seq.num_tokens - 1
        for name, buffer in row.seq.columns.items():
            tail = (row.picks,) if name == PICKS else ()
            width = int(np.prod(tail))
            places = [
                [value(row.number, i, e) for e in range(width)] for i in range(len(row.output))
            ]
            want = np.array(places, buffer.array().dtype).reshape(len(row.output), *tail)
            np.testing.assert_array_equal(buffer.array(), want, strict=True)

    def _check_outcome(self, row: PlainRow) -> None:
        assert row.outcome is not None
        reason, stop, text = row.outcome
        assert (row.seq.finish_reason, row.seq.stop_text) == (reason, stop)
        assert row.seq.stop.text_before_stop == text
        assert (row.seq.error is not None) == (reason == "error")
        if row.seq.error is not None:
            assert row.seq.error.type == "non_finite_logits"
            assert f"at token {row.seq.num_tokens}:" in str(row.seq.error)

    def check(self) -> None:
        table = self.table
        assert len(table) == len(self.running)
        assert {id(seq) for seq in table.rows} == {id(row.seq) for row in self.running}
        assert table.num_committed == self.num_committed
        slots = self._slots(self.running)
        assert set(np.flatnonzero(table.occupied)) == set(slots.tolist())
        for row, slot in zip(self.running, slots.tolist(), strict=True):
            assert table[slot] is row.seq
            assert table.num_tokens[slot] == row.seq.num_prompt_tokens + len(row.output)
            launched = sum((row, row.life) in launch.rows for launch in self.in_flight)
            assert table.launched[slot] == launched
            assert table.prompt_lens[slot] == row.seq.num_prompt_tokens
            assert table.max_tokens[slot] == row.seq.max_tokens
            assert table.exact[slot] == (not row.seq.stop.stop_ids and not row.seq.stop.strings)
            assert table.reserved[slot] == 17


@given(
    seed=st.integers(0, 2**32),
    capacity=st.integers(1, 6),
    width=st.integers(1, 5),
    depth=st.integers(0, 3),
    longest=st.sampled_from([3, 12, 200]),
    steps=st.integers(1, 60),
)
def test_commit_equals_rows_that_take_their_tokens_one_by_one(
    seed: int, capacity: int, width: int, depth: int, longest: int, steps: int
) -> None:
    rng = random.Random(seed)
    world = World(rng, capacity=capacity, width=width, longest=longest)
    for _ in range(steps):
        if rng.random() < 0.4:
            world.add_rows()
        world.decode()
        while len(world.in_flight) > depth:
            world.commit()
            world.check()
        if world.running and rng.random() < 0.1:
            world.drop(rng.choice(world.running), again=rng.random() < 0.5)
            world.check()
    while world.in_flight:
        world.commit()
        world.check()
    for row in list(world.running):
        world.drop(row, again=False)


def make_seq(
    stops: Mapping[int, str], *, max_new: int, min_new: int = 0, columns: tuple[str, ...] = ()
) -> Sequence:
    declared = tuple(OutputColumn(name, np.dtype(np.int64)) for name in columns)
    stop = StopRule(stops, (), min_new, max_new)
    return Sequence("row", [50, 51], RequestParams(), stop, declared)


def output_of(tokens: list[list[int]], columns: Mapping[str, list[list[int]]]) -> HostOutput:
    """One row of tokens each; shorter ones are filled up with token 1."""
    width = max(len(row) for row in tokens)
    filled = [row + [1] * (width - len(row)) for row in tokens]
    counts = np.array([len(row) for row in tokens], np.int32)
    arrays = {name: np.array(values, np.int64) for name, values in columns.items()}
    return HostOutput(counts, np.array(filled), np.zeros(len(tokens), np.bool_), arrays)


@pytest.mark.parametrize("first", [1, 63, 64, 65, 200])
@pytest.mark.parametrize("second", [0, 1, 64, 130])
def test_one_step_may_bring_more_tokens_than_the_log_holds(first: int, second: int) -> None:
    table, seq = RunningBatch(1), make_seq({}, max_new=1000, columns=("c",))
    table.add(seq, reserved=8)
    total = 0
    for count in (first, second):
        tokens = [(total + i) % 100 for i in range(count)]
        values = [[total + i for i in range(count)]]
        step = output_of([tokens or [0]], {"c": values if count else [[-1]]})
        step.num_tokens[0] = count
        slots = np.array([seq.batch_slot])
        assert table.commit(slots, table.epochs[slots], step) == []
        total += count
    table.remove(seq)
    assert seq.token_ids[2:] == [i % 100 for i in range(total)]
    assert seq.columns["c"].array().tolist() == list(range(total))


@pytest.mark.parametrize(
    ("make", "tokens", "kept", "outcome"),
    [
        (lambda: make_seq({7: "seven"}, max_new=9), [3, 7, 7], [3, 7], ("stop", "seven")),
        (lambda: make_seq({7: "seven", 3: "t"}, max_new=9), [3, 7], [3], ("stop", "t")),
        (lambda: make_seq({7: "seven"}, max_new=2), [3, 7, 3], [3, 7], ("stop", "seven")),
        (lambda: make_seq({7: "seven"}, max_new=2), [3, 3, 7], [3, 3], ("length", None)),
        (lambda: make_seq({7: "seven"}, max_new=9, min_new=2), [7, 3], [7, 3], None),
        (lambda: make_seq({7: "seven"}, max_new=9, min_new=2), [7, 7], [7, 7], ("stop", "seven")),
    ],
)
def test_the_first_stop_wins(
    make: Callable[[], Sequence],
    tokens: list[int],
    kept: list[int],
    outcome: tuple[str, str | None] | None,
) -> None:
    table, seq = RunningBatch(3), make()
    table.add(make_seq({9: "nine"}, max_new=5), reserved=8)  # its stop ids are not the other's
    table.add(seq, reserved=8)
    slots = np.array([seq.batch_slot])
    finished = table.commit(slots, table.epochs[slots], output_of([tokens], {}))
    table.remove(seq)
    assert seq.token_ids[2:] == kept and table.num_committed == len(kept)
    assert finished == ([] if outcome is None else [seq])
    if outcome is not None:
        assert (seq.finish_reason, seq.stop_text) == outcome


def test_a_step_of_no_rows_is_nothing() -> None:
    none = np.empty(0, np.int64)
    step = HostOutput(none.astype(np.int32), none.reshape(0, 1), none.astype(np.bool_), {})
    assert RunningBatch(2).commit(none, none, step) == []
