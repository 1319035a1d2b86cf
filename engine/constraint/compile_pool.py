"""A pool of background threads that call one function, for work whose duration must not delay
anything.

`GrammarCompiler` compiles constraints on such threads. At the interpreter's end, Python's
`ThreadPoolExecutor` would wait for every running call, however long; this pool does not.
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
"""The queue of arguments that wait for a thread, each with the future of its result. None ends a
thread."""

_EXIT_SECONDS = 5.0
"""The most seconds that the interpreter waits at its end for running calls."""


class DaemonPool(Generic[A, R]):
    """Calls one function for many arguments on a few threads, named "{name}-0" and so on.

    When the pool is closed or collected, or the interpreter ends, waiting calls are cancelled, and
    each thread ends after its current call. The interpreter would join the threads of a
    `ThreadPoolExecutor`, even if their calls in native code take long; these threads are daemons,
    which end with the process. Before that, the interpreter waits up to five seconds for running
    calls: until Python 3.14, native code that returns to an interpreter being torn down makes C++
    abort the process.

    `submit` and `close` must not run at the same time. The function must not refer to the pool, or
    the pool would never be collected.
    """

    def __init__(self, function: Callable[[A], R], num_threads: int, name: str) -> None:
        self._jobs: _Jobs[R, A] = SimpleQueue()
        self._threads = [
            _Worker(function, self._jobs, num_threads, f"{name}-{i}") for i in range(num_threads)
        ]
        self._finalizer = weakref.finalize(self, _cancel, self._jobs, num_threads)
        self._finalizer.atexit = False  # `_end_workers` does more

    def submit(self, argument: A) -> Future[R]:
        """Queue a call and return its future. The first call starts the threads. The future is
        cancelled if the pool is closed before the call begins. Raises RuntimeError if the pool is
        closed already."""
        if not self._finalizer.alive:
            raise RuntimeError("the pool is closed")
        future: Future[R] = Future()
        self._jobs.put((future, argument))
        for thread in self._threads:
            if thread.ident is None:
                thread.start()
        return future

    def close(self) -> None:
        """Cancel waiting calls, and let the threads end by themselves. May be called again."""
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
                # Any error belongs to the caller that waits for the future; here it would be lost.
                except BaseException as error:
                    future.set_exception(error)
            # The error's traceback holds this frame. If the frame held the future, the cycle would
            # keep everything alive that the function refers to.
            del job, future, argument

    def cancel_queued(self) -> None:
        _cancel(self._jobs, self._num_threads)


def _cancel(jobs: _Jobs[R, A], num_threads: int) -> None:
    """Cancel waiting calls and end the threads. It takes no lock, because a garbage collector calls
    it."""
    while True:
        try:
            job = jobs.get_nowait()
        except Empty:
            break
        if job is not None:
            future, _ = job
            if future.cancel():
                future.set_running_or_notify_cancel()  # wakes `concurrent.futures.wait`
    for _ in range(num_threads):
        jobs.put(None)


@atexit.register
def _end_workers() -> None:
    """End the threads of all pools, and give running calls a moment to return."""
    workers = [thread for thread in threading.enumerate() if isinstance(thread, _Worker)]
    for worker in workers:
        worker.cancel_queued()
    deadline = time.monotonic() + _EXIT_SECONDS
    for worker in workers:
        worker.join(max(0.0, deadline - time.monotonic()))
