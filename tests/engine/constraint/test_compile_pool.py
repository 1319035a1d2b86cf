"""The threads that compile: they do the work, and nothing waits for them when it is no longer
wanted.
"""

from __future__ import annotations

import gc
import signal
import subprocess
import sys
import threading
import weakref
from concurrent.futures import FIRST_COMPLETED, CancelledError, Future, wait
from pathlib import Path

import pytest

from batchgen.engine.constraint.compile_pool import DaemonPool
from tests.support.cases import thorough

SECONDS = 60.0
"""More than enough for anything that does not wait for queued work."""


class Gate:
    """A function that returns its argument when the gate opens."""

    def __init__(self) -> None:
        self.entered, self.opened = threading.Semaphore(0), threading.Event()

    def __call__(self, number: int) -> int:
        self.entered.release()
        assert self.opened.wait(SECONDS)
        return number


def pool_threads(name: str) -> list[threading.Thread]:
    return [thread for thread in threading.enumerate() if thread.name.startswith(f"{name}-")]


def test_calls_run_on_the_threads_and_errors_reach_who_waits() -> None:
    pool: DaemonPool[int, int] = DaemonPool(lambda number: 12 // number, 2, "divide")
    futures = [pool.submit(number) for number in range(4)]
    assert isinstance(futures[0].exception(SECONDS), ZeroDivisionError)
    assert [future.result(SECONDS) for future in futures[1:]] == [12, 6, 4]
    assert len(pool_threads("divide")) == 2
    pool.close()


def test_close_cancels_what_waits_and_lets_the_running_calls_end() -> None:
    gate = Gate()
    pool = DaemonPool(gate, 2, "closed")
    futures = [pool.submit(number) for number in range(50)]
    for _ in range(2):
        assert gate.entered.acquire(timeout=SECONDS)
    threads = pool_threads("closed")
    pool.close()
    pool.close()
    assert not any(future.done() for future in futures[:2])
    assert all(future.cancelled() for future in futures[2:])
    assert wait(futures, SECONDS, FIRST_COMPLETED).done == {*futures[2:]}
    with pytest.raises(CancelledError):
        futures[9].result(SECONDS)
    with pytest.raises(RuntimeError, match="closed"):
        pool.submit(1)
    gate.opened.set()
    assert [future.result(SECONDS) for future in futures[:2]] == [0, 1]
    for thread in threads:
        thread.join(SECONDS)
        assert not thread.is_alive()


def test_a_waiter_wakes_when_its_future_is_cancelled() -> None:
    gate = Gate()
    pool = DaemonPool(gate, 1, "waited")
    pool.submit(0)
    assert gate.entered.acquire(timeout=SECONDS)
    future = pool.submit(1)
    found: list[set[Future[int]]] = []
    waiter = threading.Thread(target=lambda: found.append(wait([future], SECONDS).done))
    waiter.start()
    pool.close()
    waiter.join(SECONDS / 2)
    assert found == [{future}]
    gate.opened.set()


@pytest.mark.parametrize("collected", ["by count", "as a cycle"])
def test_a_pool_that_nobody_refers_to_is_closed(collected: str) -> None:
    gate = Gate()
    pool = DaemonPool(gate, 1, "dropped")
    pool.submit(0)
    assert gate.entered.acquire(timeout=SECONDS)
    futures = [pool.submit(number) for number in range(9)]
    [thread] = pool_threads("dropped")
    if collected == "as a cycle":
        cycle: list[object] = [pool]
        cycle.append(cycle)
        del cycle
    dead = weakref.ref(pool)
    del pool
    gc.collect()
    assert dead() is None
    assert all(future.cancelled() for future in futures)
    gate.opened.set()
    thread.join(SECONDS)
    assert not thread.is_alive()


def test_an_error_does_not_keep_the_function_alive() -> None:
    class Refusing:
        def __call__(self, number: int) -> int:
            raise ValueError(number)

    function = Refusing()
    pool = DaemonPool(function, 1, "failing")
    error = pool.submit(1).exception(SECONDS)
    assert isinstance(error, ValueError)
    [thread] = pool_threads("failing")
    dead = weakref.ref(function)
    gc.disable()
    try:
        del pool, function, error
        thread.join(SECONDS)
        del thread
        assert dead() is None
    finally:
        gc.enable()


POOL = """
import time
from batchgen.engine.constraint.compile_pool import DaemonPool

pool = DaemonPool(time.sleep, 2, "slow")
futures = [pool.submit(300.0) for _ in range(200)]
"""
COMPILER = """
import time
from tests.support.engine.constrained_rows import END, WIDTH, make_tokenizer
from batchgen.engine.constraint.compiler import GrammarCompiler, _Work
from batchgen.engine.constraint.constraint import Constraint

_Work.run = lambda self, constraint: time.sleep(300.0)
compiler = GrammarCompiler(make_tokenizer(), WIDTH, (END,))
futures = [compiler.prepare(Constraint("regex", "a" * n)) for n in range(1, 201)]
"""


@pytest.mark.parametrize(
    ("made", "end", "code"),
    [
        pytest.param(POOL, "", 0, marks=pytest.mark.slow),
        pytest.param(POOL, "raise SystemExit(3)", 3, marks=pytest.mark.slow),
        pytest.param(POOL, "pool.close()", 0, marks=pytest.mark.slow),
        (POOL, "futures[-1].result()", -signal.SIGINT),
        *thorough((COMPILER, "futures[-1].result()", -signal.SIGINT)),
    ],
)
def test_a_process_ends_without_waiting_for_what_is_queued(made: str, end: str, code: int) -> None:
    """One of the 200 calls alone takes 300 s."""
    root = Path(__file__).parents[3]
    # Tests that were started in the background may ignore SIGINT, and children inherit that.
    heard = "import signal\nsignal.signal(signal.SIGINT, signal.default_int_handler)"
    found = f"import sys\nsys.path.insert(0, {str(root)!r})"
    script = f"{heard}\n{found}\n{made}"
    process = subprocess.Popen(
        [sys.executable, "-c", f"{script}\nprint('ready', flush=True)\n{end}"],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    try:
        assert process.stdout is not None
        assert process.stdout.readline() == "ready\n", process.communicate()[1]
        if code < 0:
            process.send_signal(-code)
        _, errors = process.communicate(timeout=100)
        assert process.returncode == code, errors
    finally:
        process.kill()
        process.communicate()
