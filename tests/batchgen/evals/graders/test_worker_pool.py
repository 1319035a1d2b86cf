"""Worker processes that hang, crash and eat memory cost one item each."""

import os
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from batchgen.evals.graders.grading_pool import Ready, WorkerPool
from batchgen.evals.graders.step import GradeFailure
from tests.support.jobs import bad_functions

Pool = WorkerPool[Any, Any]
ROOT = Path(__file__).parents[4]
LIMIT = 3.0


@pytest.fixture(scope="module")
def pool() -> Iterator[Pool]:
    with WorkerPool(bad_functions.double, workers=2, seconds=LIMIT, memory_bytes=4 << 30) as pool:
        yield pool


def kinds(results: list[Any]) -> list[Any]:
    return [result.type if isinstance(result, GradeFailure) else result for result in results]


def alive(pid: int) -> bool:
    return Path(f"/proc/{pid}").exists()


@pytest.mark.thorough
def test_each_misfortune_costs_its_own_item(pool: Pool) -> None:
    items = [
        1,
        "hang",
        2,
        "kill",
        3,
        "memory",
        4,
        "raise",
        5,
        "exit",
        6,
        "typed",
        7,
        "hang in C",
        8,
    ]
    wanted = [2, "timeout", 4, "crash", 6, "memory", 8, "failed", 10, "crash", 12, "no_target", 14]
    found = list(pool.map(items))
    assert kinds(found) == [*wanted, "timeout", 16]
    assert "signal 9" in str(found[3]) and "code 3" in str(found[9]) and "KeyError" in str(found[7])


def test_order_is_kept_and_the_pool_lives_on(pool: Pool) -> None:
    items = [0.05 if i % 97 == 0 else i for i in range(1000)]
    assert list(pool.map(items)) == [item * 2 for item in items]
    pids = pool.pids
    assert list(pool.map(range(10))) == list(range(0, 20, 2)) and pool.pids == pids


@pytest.mark.timeout(200)
def test_the_first_item_of_a_new_process_has_the_same_limit() -> None:
    """The time that a process may take to start is none that its first call may take."""
    with WorkerPool(bad_functions.double, workers=1, seconds=LIMIT, start_seconds=1e6) as pool:
        assert kinds(list(pool.map(["kill", "hang", 1]))) == ["crash", "timeout", 2]


def test_large_items_and_results_pass(pool: Pool) -> None:
    items = ["large", "x" * 3_000_000] * 8
    assert [len(str(result)) for result in pool.map(items)] == [3_000_000, 6_000_000] * 8


def test_it_reads_no_more_than_its_window_ahead() -> None:
    read = []

    def items() -> Iterator[Any]:
        for i in range(1000):
            read.append(i)
            yield Ready(i) if i % 3 else i

    with WorkerPool(bad_functions.double, workers=1, window=20) as pool:
        results = pool.map(items())
        for i in range(100):
            assert next(results) == (i if i % 3 else i * 2)
            assert len(read) <= i + 21


def test_a_slow_reader_makes_no_call_late() -> None:
    with WorkerPool(bad_functions.double, workers=1, seconds=0.5) as pool:
        results = pool.map([0.2] * 4 + list(range(50)))
        first = next(results)
        time.sleep(2.0)
        assert [first, *results] == [0.4] * 4 + list(range(0, 100, 2))


def test_what_an_abandoned_map_had_sent_is_nobodys_result(pool: Pool) -> None:
    results = pool.map(range(500))
    assert next(results) == 0
    results.close()  # type: ignore[attr-defined]
    assert list(pool.map([5, 6])) == [10, 12]


def test_an_error_of_the_items_reaches_the_caller(pool: Pool) -> None:
    def items() -> Iterator[int]:
        yield 1
        raise OSError("disk")

    with pytest.raises(OSError, match="disk"):
        list(pool.map(items()))
    assert list(pool.map([1])) == [2]


def test_a_process_that_cannot_start_ends_the_map_and_blames_no_item() -> None:
    with WorkerPool(bad_functions.double, prepare=bad_functions.broken, workers=1) as pool:
        with pytest.raises(RuntimeError, match=r"does not start.*code 7"):
            list(pool.map([1, 2]))


def test_close_leaves_no_process() -> None:
    with WorkerPool(bad_functions.double, workers=2) as pool:
        assert next(pool.map([1] * 200)) == 2
        pids = pool.pids
        assert pids
    assert not any(map(alive, pids))
    with pytest.raises(RuntimeError, match="closed"):
        pool.map([1])


HANGING = """
import signal, sys
# A shell that runs the tests in the background has its children ignore SIGINT.
signal.signal(signal.SIGINT, signal.default_int_handler)
from tests.support.jobs import bad_functions
from batchgen.evals.graders.grading_pool import WorkerPool
pool = WorkerPool(bad_functions.double, workers=2, seconds=1000)
results = pool.map([1, 1, "hang in C", "hang in C"])
next(results)
print(*pool.pids, flush=True)
list(results)
"""


@pytest.mark.quick(1)
@pytest.mark.parametrize("signal", ["SIGINT", "SIGTERM", "SIGKILL"])
def test_no_worker_outlives_its_parent(signal: str) -> None:
    """A signal to the parent alone, while its workers are in calls that nothing interrupts."""
    import signal as signals

    process = subprocess.Popen(
        [sys.executable, "-c", HANGING],
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        text=True,
        env={**os.environ, "PYTHONPATH": str(ROOT)},
    )
    assert process.stdout is not None
    pids = [int(pid) for pid in process.stdout.readline().split()]
    try:
        assert pids
        process.send_signal(getattr(signals, signal))
        process.wait(30)
    finally:
        process.kill()
        process.wait()
        process.stdout.close()
    deadline = time.monotonic() + 30
    while any(map(alive, pids)) and time.monotonic() < deadline:
        time.sleep(0.02)
    assert not any(map(alive, pids))
