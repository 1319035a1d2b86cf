"""A pool of background threads that call one function, for work which nothing may have to wait for
without a bound.

`GrammarCompiler` compiles constraints on such threads. Python's `ThreadPoolExecutor` would make the
interpreter wait at its end for every call that runs, however long; this pool does not.
"""

from __future__ import annotations

import atexit
import threading
import time
import weakref
from collections.abc import Callable
from concurrent.futures import Future
from queue import Empty, SimpleQueue
from typing import Generic, TypeVar

A = TypeVar("A")
R = TypeVar("R")
_Jobs = SimpleQueue[tuple[Future[R], A] | None]
"""The arguments that wait for a thread, with the futures of their results. None ends a thread."""

_EXIT_SECONDS = 5.0
"""The longest time that the interpreter waits at its end for calls that already run."""


class DaemonPool(Generic[A, R]):
    """Calls one function for many arguments on a few threads, named "{name}-0" and so on.

    When the pool is closed or collected, or the interpreter ends, calls that wait are cancelled,
    and each thread ends after its call. The interpreter would join the threads of a
    `ThreadPoolExecutor`, however long their calls in native code take; these are daemons, which end
    with the process. Before that, the interpreter waits up to five seconds for calls that run:
    until Python 3.14, native code that returns to an interpreter being torn down makes C++ abort
    the process.

    `submit` and `close` must not run at once, and the function must not refer to the pool, or the
    pool would never be collected.
    """

    def __init__(self, function: Callable[[A], R], num_threads: int, name: str) -> None:
        self._jobs: _Jobs[R, A] = SimpleQueue()
        self._threads = [
            _Worker(function, self._jobs, num_threads, f"{name}-{i}") for i in range(num_threads)
        ]
        self._finalizer = weakref.finalize(self, _cancel, self._jobs, num_threads)
        self._finalizer.atexit = False  # `_end_workers` does more

    def submit(self, argument: A) -> Future[R]:
        """Queue a call and return its future, which is cancelled if the pool is closed before it
        begins.

        The first call starts the threads. Raises RuntimeError if the pool is closed.
        """
        if not self._finalizer.alive:
            raise RuntimeError("the pool is closed")
        future: Future[R] = Future()
        self._jobs.put((future, argument))
        for thread in self._threads:
            if thread.ident is None:
                thread.start()
        return future

    def close(self) -> None:
        """Cancel the calls that wait, and let the threads end by themselves; may be repeated."""
        self._finalizer()


class _Worker(threading.Thread, Generic[A, R]):
    """One thread of a pool. It does not refer to the pool."""

    def __init__(
        self, function: Callable[[A], R], jobs: _Jobs[R, A], num_threads: int, name: str
    ) -> None:
        super().__init__(name=name, daemon=True)
        self._function = function
        self._jobs = jobs
        self._num_threads = num_threads

    def run(self) -> None:
        while (job := self._jobs.get()) is not None:
            future, argument = job
            if future.set_running_or_notify_cancel():
                try:
                    future.set_result(self._function(argument))
                # Any error at all belongs to whoever waits for the future; here it would be lost.
                except BaseException as error:
                    future.set_exception(error)
            # The traceback of the error holds this frame, which must not hold the future in turn:
            # the cycle would keep alive all that the function refers to.
            del job, future, argument

    def cancel_queued(self) -> None:
        _cancel(self._jobs, self._num_threads)


def _cancel(jobs: _Jobs[R, A], num_threads: int) -> None:
    """Cancel calls that wait and end the threads, without a lock: a garbage collector calls it."""
    while True:
        try:
            job = jobs.get_nowait()
        except Empty:
            break
        if job is not None and job[0].cancel():
            job[0].set_running_or_notify_cancel()  # wakes `concurrent.futures.wait`
    for _ in range(num_threads):
        jobs.put(None)


@atexit.register
def _end_workers() -> None:
    """End the threads of all pools, and give the calls that run a moment to return."""
    workers = [thread for thread in threading.enumerate() if isinstance(thread, _Worker)]
    for worker in workers:
        worker.cancel_queued()
    deadline = time.monotonic() + _EXIT_SECONDS
    for worker in workers:
        worker.join(max(0.0, deadline - time.monotonic()))
