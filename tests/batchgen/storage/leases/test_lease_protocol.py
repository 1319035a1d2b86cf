"""The protocol of the workers under crashes, pauses, wrong clocks and unanswered requests."""

from __future__ import annotations

import itertools
from typing import Any

import pytest
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule

from batchgen.storage.leases.failure_detector import FailureDetector
from batchgen.storage.leases.lease_files import (
    FINISH,
    lease_name,
    mark_name,
    published_name,
    worker_name,
)
from batchgen.storage.leases.lease_protocol import MOST_ENDED, Member, Task
from batchgen.storage.leases.lease_table import Lease, LeaseTable
from batchgen.storage.leases.store_operations import Create, Unanswered, carry_out, create
from tests.support.jobs.workers_model import ROWS, STALE, MemoryStore, Worker, whole

WORKERS = st.integers(0, 4)


class Workers(RuleBasedStateMachine):
    """Up to five workers at a time over a few shards, with everything that can happen to them."""

    faults: tuple[str | None, ...] = (None,)

    @initialize(shards=st.integers(1, 4))
    def begin(self, shards: int) -> None:
        self.store, self.shards, self.started = MemoryStore(), shards, 0
        self.living: list[Worker] = []
        self.published: dict[str, bytes] = {}
        self.spawn()

    @rule()
    def spawn(self) -> None:
        """A worker comes, which may have to wait until it does its first step."""
        if len(self.living) < 5:
            self.started += 1
            self.living.append(Worker(self.store, self.shards, seed=self.started))

    @rule(which=WORKERS, steps=st.integers(1, 25), data=st.data())
    def run(self, which: int, steps: int, data: st.DataObject) -> None:
        """One worker goes on while all others stand still."""
        if not self.living:
            return
        worker = self.living[which % len(self.living)]
        at = data.draw(st.integers(0, 24)) if len(self.faults) > 1 else -1
        for i in range(steps):
            fault = data.draw(st.sampled_from(self.faults)) if i == at else None
            worker.step(fault)
            if worker.ended is not None:
                self.living.remove(worker)
                return
            if fault == "torn":  # others go on before it does
                return

    @rule(which=WORKERS)
    def crash(self, which: int) -> None:
        if self.living:
            del self.living[which % len(self.living)]

    @rule(which=WORKERS)
    def beat(self, which: int) -> None:
        if self.living:
            self.living[which % len(self.living)].beat()

    @rule(which=WORKERS, seconds=st.sampled_from([1.0, STALE, 100 * STALE]))
    def time_passes(self, which: int, seconds: float) -> None:
        """For one worker alone: its clock may be much faster than those of others."""
        if self.living:
            self.living[which % len(self.living)].clock += seconds

    @invariant()
    def no_row_is_lost(self) -> None:
        for shard, row in self.store.acknowledged:
            assert row in self.store.rows(shard)

    @invariant()
    def a_shard_is_published_once_and_whole(self) -> None:
        for shard in range(self.shards):
            name = published_name(shard)
            content = self.store.objects.get(name)
            assert content is None or content == whole(shard)
            assert self.store.created.count(name) == (content is not None)

    def teardown(self) -> None:
        """A last worker, while the others stand still for ever, brings the job to its end."""
        if not hasattr(self, "store"):
            return
        last = Worker(self.store, self.shards, seed=99)
        for _ in range(3000):
            last.step()
            if last.ended is not None:
                break
        assert last.ended == "complete"
        for shard in range(self.shards):
            if mark_name(shard, "quarantined") not in self.store.objects:
                assert self.store.objects[published_name(shard)] == whole(shard)
        self.no_row_is_lost()


class WorkersOnAnObjectStore(Workers):
    """Workers where requests may stay unanswered, whether they have happened or not."""

    faults = (None, "before", "after")


class WorkersWithoutLinks(Workers):
    """Workers on a file system without links, where others see leases that are not whole yet, and
    leases that never become whole because their worker was killed."""

    faults = (None, "torn")


_SETTINGS = settings(
    max_examples=60, stateful_step_count=30, deadline=None,
    suppress_health_check=[HealthCheck.too_slow],
)  # fmt: skip
TestWorkers = Workers.TestCase
TestWorkers.settings = _SETTINGS
TestWorkersOnAnObjectStore = WorkersOnAnObjectStore.TestCase
TestWorkersOnAnObjectStore.settings = _SETTINGS


TestWorkersWithoutLinks = WorkersWithoutLinks.TestCase
TestWorkersWithoutLinks.settings = _SETTINGS


@pytest.mark.slow
class TestManyRunsWithoutLinks(WorkersWithoutLinks.TestCase):  # type: ignore[misc, valid-type]
    settings = settings(_SETTINGS, max_examples=2000, stateful_step_count=60)


@pytest.mark.slow
class TestManyRuns(WorkersOnAnObjectStore.TestCase):  # type: ignore[misc, valid-type]
    settings = settings(_SETTINGS, max_examples=5000, stateful_step_count=60)


def _run_all(workers: list[Worker]) -> None:
    """Let workers take turns until all have ended."""
    for worker in itertools.islice(itertools.cycle(workers), 100_000):
        if worker.ended is None:
            worker.step()
            worker.beat()
        if all(w.ended for w in workers):
            return
    raise AssertionError("the workers do not come to an end")


@pytest.mark.parametrize("count", [1, 2, 7])
def test_workers_divide_the_shards(count: int) -> None:
    store = MemoryStore()
    workers = [Worker(store, 20, seed=i) for i in range(count)]
    _run_all(workers)
    computed = [row for worker in workers for row in worker.computed]
    assert set(computed) == {(shard, row) for shard in range(20) for row in range(ROWS)}
    assert len(computed) <= 20 * ROWS + 3 * count  # what backup copies have computed twice
    assert {w.ended for w in workers} == {"complete"}
    assert len({w.number for w in workers}) == count


def test_every_moment_of_a_kill_with_one_to_take_over() -> None:
    """A worker is killed after each number of steps that it ever takes."""
    alone = Worker(MemoryStore(), 2)
    steps = 0
    while alone.ended is None:
        alone.step()
        steps += 1
    for kill in range(steps):
        store = MemoryStore()
        first, second = Worker(store, 2), Worker(store, 2, seed=1)
        for _ in range(kill):
            first.step()
        _run_all([second])
        assert [store.objects[published_name(k)] for k in range(2)] == [whole(0), whole(1)]
        assert not set(first.computed[:-1]) & set(second.computed)


def test_every_moment_of_a_pause_while_another_worker_ends_the_job() -> None:
    for pause in range(60):
        store = MemoryStore()
        first, second = Worker(store, 2), Worker(store, 2, seed=1)
        for _ in range(pause):
            if first.ended is None:
                first.step()
        _run_all([second])
        if first.ended is None:
            _run_all([first])
        assert store.created.count(published_name(0)) == 1


def test_a_shard_that_ends_three_workers_is_left_alone() -> None:
    store = MemoryStore()
    ended = []
    for seed in range(8):
        worker = Worker(store, 3, seed=seed, poison=(1, 1))
        _run_all([worker])
        ended.append(worker.ended)
    assert ended == ["failed"] * MOST_ENDED + ["complete"] * 5
    assert mark_name(1, "quarantined") in store.objects
    assert {k for k in range(3) if published_name(k) in store.objects} == {0, 2}
    assert store.rows(1) >= {0}  # what was finished of it stays


@pytest.mark.parametrize(
    ("happened", "content", "expected"),
    [(True, b"me", True), (True, b"you", False), (False, b"", True)],
)
def test_a_request_that_is_not_answered_is_known_by_its_content(
    happened: bool, content: bytes, expected: bool
) -> None:
    store, attempts = MemoryStore(), list[Create]()

    def do(operation: Any) -> Any:
        if isinstance(operation, Create):
            attempts.append(operation)
            if len(attempts) == 1:
                if happened:
                    store.do(Create(operation.name, content))
                raise Unanswered
        return store.do(operation)

    assert carry_out(create("leases/x", b"me"), do) is expected


def test_names_that_are_no_leases_are_passed_over() -> None:
    names = [lease_name(3, 2), lease_name(3, 11), lease_name(4, 1, "b"), mark_name(7, "done")]
    board = LeaseTable.of(
        [name.partition("/")[2] for name in names] + [".00001.tmp", "x", "1.e1.json"]
    )
    assert board == LeaseTable({3: 11}, {4: 1}, {7})


def _members(store: MemoryStore, clocks: list[float], count: int = 2) -> list[Member]:
    def watch(i: int) -> FailureDetector:
        return FailureDetector(STALE, lambda: clocks[i], lambda beat: False)

    members = [Member(i + 1, watch(i), lambda below: 0) for i in range(count)]
    for member in members:
        member.num_shards = 1
        store.objects[worker_name(member.number)] = b'{"ended": null}'
    return members


@pytest.mark.parametrize("content", [b"", b'{"worker": 1', bytes(20), b'{"worker": 1}', b"[]"])
def test_a_lease_that_cannot_be_read_is_nobody_s_until_it_is_old(content: bytes) -> None:
    """Neither does everyone take it for its own, nor is it held for ever."""
    store, clocks = MemoryStore(), [0.0, 0.0]
    one, two = _members(store, clocks)
    for shard in (0, FINISH):
        store.objects[lease_name(shard, 1)] = content
    for member in (one, two):
        assert carry_out(member.next_task(idle=True), store.do).kind == "wait"
        assert not carry_out(member.claim(FINISH), store.do)
        assert carry_out(member.lost(0), store.do)
    clocks[0] += STALE
    assert carry_out(one.next_task(idle=True), store.do) == Task("shard", 0)
    assert carry_out(one.claim(FINISH), store.do)
    clocks[1] += STALE
    assert carry_out(two.next_task(idle=True), store.do).kind == "backup"
    assert not carry_out(two.claim(FINISH), store.do)
    assert carry_out(one.claim(FINISH), store.do)


def test_a_lease_that_becomes_whole_late_is_its_worker_s() -> None:
    store, clocks = MemoryStore(), [0.0, 0.0]
    _, two = _members(store, clocks)
    store.objects[lease_name(0, 1)] = b""
    assert carry_out(two.next_task(idle=True), store.do).kind == "wait"
    clocks[1] += STALE / 2
    store.objects[lease_name(0, 1)] = Lease(1).encoded()
    assert carry_out(two.next_task(idle=True), store.do) == Task("backup", 0)
    assert lease_name(0, 2) not in store.objects
