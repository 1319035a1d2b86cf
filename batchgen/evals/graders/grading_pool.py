"""A pool of worker processes that may hang or die; each such failure costs a single item.

`Grader` uses it for steps that could hang or crash, such as those with regular expressions of
users.
"""

from __future__ import annotations

import json
import math
import os
import pickle
import socket
import subprocess
import sys
import time
import weakref
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from multiprocessing.connection import Connection, wait
from types import TracebackType
from typing import Any, Generic, TypeVar

from batchgen.evals.graders.grading_worker import READY
from batchgen.evals.graders.step import GradeFailure

A = TypeVar("A")
R = TypeVar("R")

# The program of a worker, which gets the parent's import path as an argument.
_PROGRAM = (
    "import json, sys; sys.path[:] = json.loads(sys.argv[2]); "
    "from batchgen.evals.graders.grading_worker import main; main()"
)
_BATCH_SECONDS = 0.05
"""A worker is sent about as many items together as it finishes in this time."""
_MOST_AT_ONCE = 64  # items


@dataclass(frozen=True, slots=True)
class Ready(Generic[R]):
    """An item whose result is known without a call. `map` yields the result in its turn."""

    result: R


@dataclass
class _Task(Generic[A]):
    """An item that is not sent yet, or that a worker has."""

    number: int
    item: A


@dataclass
class _Worker(Generic[A]):
    """A running process.

    Attributes:
        tasks: the items that were sent and not answered; it is working on the first.
        since: the earliest time at which it can have begun the first item; before it is ready, the
            time of its start.
        sent: the time at which the items were sent.
        ready: whether it has reported that it can begin.
        at_once: the number of items that it is sent next.
    """

    process: subprocess.Popen[bytes]
    connection: Connection[Any, Any]
    tasks: deque[_Task[A]] = field(default_factory=deque)
    since: float = 0.0
    sent: float = 0.0
    ready: bool = False
    at_once: int = 1

    def kill(self) -> None:
        """End the process and wait for its end. May be called again."""
        self.process.kill()
        self.process.wait()
        self.connection.close()


class WorkerPool(Generic[A, R]):
    """Calls one function for many items in processes that can be killed.

    `map` yields the results in the order of the items. An item whose call takes longer than
    `seconds`, needs more memory than allowed or ends the process gets a `GradeFailure` instead of a
    result (types timeout, memory, crash); the process is replaced, and other items are not
    affected. Exceptions of the function become GradeFailures too: a GradeFailure stays as it is,
    any other exception has the type failed.

    The processes are started with a new interpreter (not forked), never import the caller's main
    module, and live until `close`. They do not outlive the process that made the pool, however that
    ends, by Linux's parent-death signal. The signal counts the thread that called `map` as the
    parent, so that thread must not end before the pool is closed.

    Args:
        function: can be pickled. It gets one item and runs in a process's main thread.
        prepare: called in each process before it gets items, to import modules that the function
            needs.
        workers: the number of processes. They start when `map` first has work for them.
        seconds: the longest time that one call may take. It begins when the process can first have
            begun the call, so that a slow reader of `map` never makes a call late.
        start_seconds: the longest time that a process may take to start and prepare.
        memory_bytes: the address space that a process may have (RLIMIT_AS).
        window: the number of items that `map` reads ahead of the result that it yields next.
    """

    def __init__(
        self,
        function: Callable[[A], R],
        *,
        prepare: Callable[[], None] | None = None,
        workers: int = 2,
        seconds: float = 10.0,
        start_seconds: float = 60.0,
        memory_bytes: int = 4 << 30,
        window: int = 512,
    ) -> None:
        assert workers >= 1 and window >= 1 and seconds > 0
        self._setup = pickle.dumps((os.getpid(), memory_bytes, function, prepare))
        self._count, self._window = workers, window
        self._seconds, self._start_seconds = seconds, start_seconds
        self._workers: list[_Worker[A]] = []
        self._finalizer = weakref.finalize(self, _kill_all, self._workers)

    def __enter__(self) -> WorkerPool[A, R]:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()

    def close(self) -> None:
        """Kill all processes and wait for their end. May be called again."""
        self._finalizer()

    @property
    def pids(self) -> list[int]:
        """The process ids of the workers that run now."""
        return [worker.process.pid for worker in self._workers]

    def map(self, items: Iterable[A | Ready[R]]) -> Iterator[R | GradeFailure]:
        """Yield the result or the failure of each item, in order, as soon as it and all before it
        are known. Reads at most `window` items ahead. Only one `map` may run at a time.

        Raises:
            RuntimeError: the pool is closed, or a process cannot start.
        """
        if not self._finalizer.alive:
            raise RuntimeError("the pool is closed")
        return self._map(iter(items))

    def _map(self, items: Iterator[A | Ready[R]]) -> Iterator[R | GradeFailure]:
        """See `map`. Items are numbered from 0: `read` were read, and `yielded` results yielded."""
        waiting: deque[_Task[A]] = deque()
        done: dict[int, R | GradeFailure] = {}
        read, yielded, more = 0, 0, True
        try:
            while more or yielded < read:
                while more and read - yielded < self._window and len(waiting) < _MOST_AT_ONCE:
                    try:
                        item = next(items)
                    except StopIteration:
                        more = False
                        break
                    if isinstance(item, Ready):
                        done[read] = item.result
                    else:
                        waiting.append(_Task(read, item))
                    read += 1
                self._send(waiting)
                if yielded not in done and yielded < read:
                    self._receive(waiting, done)
                while yielded in done:
                    yield done.pop(yielded)
                    yielded += 1
        finally:
            # Otherwise the next `map` would read results of this one.
            for worker in [worker for worker in self._workers if worker.tasks]:
                self._replace(worker)

    def _send(self, waiting: deque[_Task[A]]) -> None:
        """Send items to all workers that have none; start workers while there is work for them."""
        while waiting and len(self._workers) < self._count:
            idle = sum(not worker.tasks for worker in self._workers)
            if idle >= len(waiting):
                break
            self._start()
        for worker in list(self._workers):
            if worker.tasks or not waiting:
                continue
            share = math.ceil(len(waiting) / self._count)
            count = min(worker.at_once, max(1, share), len(waiting))
            worker.tasks.extend(waiting.popleft() for _ in range(count))
            worker.sent = time.monotonic()
            if worker.ready:
                worker.since = worker.sent
            try:
                # A worker without work reads, so this never waits for a call of the function.
                worker.connection.send([task.item for task in worker.tasks])
            except (BrokenPipeError, ConnectionResetError):
                pass  # it died while idle, which `_read` notices

    def _receive(self, waiting: deque[_Task[A]], done: dict[int, R | GradeFailure]) -> None:
        """Wait until a worker has results or exceeds its time, and handle that."""
        busy = {worker.connection: worker for worker in self._workers if worker.tasks}
        assert busy
        now = time.monotonic()
        deadline = min(worker.since + self._limit(worker) for worker in busy.values())
        ready = wait(list(busy), max(0.0, deadline - now))
        for connection in ready:
            self._read(busy[connection], waiting, done)  # type: ignore[index]
        for worker in busy.values():
            over = time.monotonic() - worker.since - self._limit(worker)
            if worker.tasks and over >= 0 and not worker.connection.closed:
                if worker.connection.poll():  # it has answered meanwhile
                    self._read(worker, waiting, done)
                else:
                    failure = GradeFailure(
                        "timeout", f"longer than {self._limit(worker):g} seconds"
                    )
                    self._give_up(worker, failure, waiting, done)

    def _limit(self, worker: _Worker[A]) -> float:
        """The seconds that a worker may take for its first item, or to start."""
        return self._seconds if worker.ready else self._start_seconds

    def _read(
        self, worker: _Worker[A], waiting: deque[_Task[A]], done: dict[int, R | GradeFailure]
    ) -> None:
        """Read all results that a worker has sent."""
        try:
            while worker.tasks and worker.connection.poll():
                message = worker.connection.recv()
                worker.since = time.monotonic()
                if message == READY:
                    worker.ready = True
                    continue
                ok, value = message
                done[worker.tasks.popleft().number] = value if ok else GradeFailure(*value)
                if not ok and value[0] == "memory":
                    self._requeue(worker, waiting)
                    return
        except (EOFError, ConnectionResetError):
            code = worker.process.wait()
            text = f"the worker ended with {'signal' if code < 0 else 'code'} {abs(code)}"
            self._give_up(worker, GradeFailure("crash", text), waiting, done)
            return
        if not worker.tasks and time.monotonic() - worker.sent < _BATCH_SECONDS:
            worker.at_once = min(worker.at_once * 2, _MOST_AT_ONCE)

    def _give_up(
        self,
        worker: _Worker[A],
        failure: GradeFailure,
        waiting: deque[_Task[A]],
        done: dict[int, R | GradeFailure],
    ) -> None:
        """Fail the item that a worker was working on, and return its other items to the queue."""
        if not worker.ready:
            self._replace(worker)
            raise RuntimeError(f"a worker process of the grader does not start: {failure}")
        done[worker.tasks.popleft().number] = failure
        self._requeue(worker, waiting)

    def _requeue(self, worker: _Worker[A], waiting: deque[_Task[A]]) -> None:
        """Return the items of a worker to the queue, and end the worker."""
        waiting.extendleft(reversed(worker.tasks))
        worker.tasks.clear()
        self._replace(worker)

    def _replace(self, worker: _Worker[A]) -> None:
        """End a worker. Another one starts when there is work for it."""
        worker.kill()
        self._workers.remove(worker)

    def _start(self) -> None:
        """Start a worker, connected by a pair of sockets, and send it the function."""
        ours, theirs = socket.socketpair()
        with theirs:
            process = subprocess.Popen(
                [sys.executable, "-P", "-c", _PROGRAM, str(theirs.fileno()), json.dumps(sys.path)],
                pass_fds=[theirs.fileno()],
                stdin=subprocess.DEVNULL,
            )
        connection: Connection[Any, Any] = Connection(ours.detach())
        self._workers.append(_Worker(process, connection, since=time.monotonic()))
        connection.send_bytes(self._setup)


def _kill_all(workers: list[_Worker[Any]]) -> None:
    for worker in workers:
        worker.kill()
    workers.clear()
