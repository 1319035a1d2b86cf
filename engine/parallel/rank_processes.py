"""Starts, watches and ends the processes of the ranks other than 0. Rank 0 makes a
`RankProcesses`."""

from __future__ import annotations

import atexit
import json
import os
import pickle
import socket
import subprocess
import sys
import threading
import time
import weakref
from collections.abc import Iterator
from contextlib import contextmanager
from multiprocessing.connection import Connection, wait
from typing import Any, NamedTuple, Protocol

from batchgen.engine.parallel.place import busy_at
from batchgen.engine.parallel.rank_group import (
    DistributedGroup,
    check_free,
    end_process,
    leave,
    serve_store,
)
from batchgen.engine.parallel.tensor_parallel import TensorParallel

READY = True
"""The message of a rank that can join the others."""


class Alive(NamedTuple):
    """The message that a rank sends regularly."""

    busy_at: str | None  # the line it is at; None if it waits for a device or for other ranks


BEAT_SECONDS = 1.0
"""The seconds between two messages `Alive`."""
_SILENT_SECONDS = 30.0
"""After this many seconds without a message, a rank is regarded as stopped or stuck."""
_STEP_SECONDS = 50.0
"""After this many seconds, a step on GPUs is regarded as hung. On a CPU a step may take any
time."""
_LEAVE_SECONDS = 5.0
"""The seconds that the engine has to notice a lost rank, before its process is ended."""
_END_SECONDS = 10.0
"""The seconds that ranks have to end by themselves."""
_LOOK_SECONDS = 0.25
"""The longest wait for messages before the ranks are checked again."""
# The arguments of a rank's process: the socket, the rank, and the `sys.path` of this process.
_PROGRAM = (
    "import json, sys; sys.path[:] = json.loads(sys.argv[3]); "
    "from batchgen.engine.parallel.rank_main import main; main()"
)


class RankRecipe(Protocol):
    """Makes the engine of a rank. It is sent to other processes by pickle."""

    def follow(self, parallel: TensorParallel, connection: Connection[Any, Any]) -> None:
        """Make the engine of this rank, and let it execute the commands of rank 0."""


class RankProcesses:
    """The processes of ranks 1 to size − 1, and the thread that watches them.

    The processes are started afresh and never import the caller's main module. A process that ends,
    hangs or reports an error is a lost rank. Then all ranks are ended, because no step can be
    computed without it, and the engine raises an error that says what happened. If it cannot,
    because it waits for a GPU that waits for the lost rank, this process is ended with exit code 1.

    Raises:
        ValueError: this process has ranks already, or the recipe cannot be sent.
        RuntimeError: a rank was lost before it was ready.
    """

    def __init__(self, size: int, recipe: RankRecipe, device: str) -> None:
        check_free()
        self._connections: dict[int, Connection[Any, Any]] = {}
        self._processes: dict[int, subprocess.Popen[bytes]] = {}
        # When each rank last sent a message. A process that is starting may be silent for long.
        self._heard: dict[int, float] = {}
        self._ready: dict[int, bool] = {}
        self._busy: dict[int, str | None] = {}  # `Alive.busy_at`
        self._gpu = device == "cuda"
        self._reason: str | None = None
        self._closed = False
        self._since: float | None = None  # when the step began; None between steps
        self._stepping: int | None = None  # the thread that runs the step
        self._left = threading.Event()  # set when the step or the start has ended or failed
        store = serve_store()
        message = _pickled((size, store.port, device, recipe))
        self._finalizer = weakref.finalize(self, _end, self._processes, self._connections)
        try:
            for rank in range(1, size):
                self._start(rank)
            threading.Thread(target=self._watch, daemon=True).start()
            with self.starting():
                self._send(message)
                while not all(self._ready.values()):
                    self.check()
                    time.sleep(_LOOK_SECONDS)
                group = DistributedGroup(0, size, store, device)
        except BaseException:
            self.close()
            raise
        self.parallel = TensorParallel(0, size, group)

    def _start(self, rank: int) -> None:
        """Start the process of a rank and connect to it."""
        ours, theirs = socket.socketpair()
        connection: Connection[Any, Any] = Connection(ours.detach())
        with theirs:
            arguments = [str(theirs.fileno()), str(rank), json.dumps(sys.path)]
            self._processes[rank] = subprocess.Popen(
                [sys.executable, "-P", "-c", _PROGRAM, *arguments],
                stdin=subprocess.DEVNULL,
                stdout=subprocess.DEVNULL,
                pass_fds=[theirs.fileno()],
            )
        self._connections[rank] = connection
        self._ready[rank] = False
        connection.send(os.getpid())

    def send(self, message: object) -> None:
        """Send an object to all other ranks. Raises OSError if a rank was lost."""
        self._send(pickle.dumps(message))

    def _send(self, data: bytes) -> None:
        for connection in list(self._connections.values()):
            connection.send_bytes(data)

    @property
    def is_lost(self) -> bool:
        """Whether a rank was lost."""
        return self._reason is not None

    def check(self) -> None:
        """Raise RuntimeError if a rank was lost; the message says why."""
        if self._reason is not None:
            raise RuntimeError(self._reason)

    @contextmanager
    def watched(self) -> Iterator[None]:
        """Watch that a step ends in time. Raises RuntimeError if a rank was lost before or during
        the step."""
        self.check()
        self._stepping = threading.get_ident()
        self._since = time.monotonic()
        with self._explained():
            yield

    @contextmanager
    def starting(self) -> Iterator[None]:
        """Run the start of rank 0's engine; if it fails, end all ranks. Raises RuntimeError if a
        rank was lost."""
        self._since = float("inf")  # the start may take any time
        try:
            with self._explained():
                yield
        except BaseException:
            self.close()
            raise

    @contextmanager
    def _explained(self) -> Iterator[None]:
        """Raise the error of a lost rank instead of its consequences."""
        self._left.clear()
        try:
            yield
            self.check()
        except Exception as error:
            self._left.set()
            # An error that all ranks have needs no explanation by another rank.
            if _is_own(error) or self._closed:
                raise
            deadline = time.monotonic() + _LEAVE_SECONDS
            while self._reason is None and time.monotonic() < deadline:
                time.sleep(_LOOK_SECONDS)
            if self._reason is None or str(error) == self._reason:
                raise
            raise RuntimeError(self._reason) from error
        finally:
            self._left.set()
            self._since = None

    def close(self) -> None:
        """End all ranks and leave their group. May be called again."""
        if self._closed:
            return
        self._closed = True
        if not self.is_lost or not self._gpu:
            leave()
        self._finalizer()

    def _watch(self) -> None:
        """Watch the ranks until they are closed or one is lost."""
        while not self._closed:
            reason = self._look()
            if self._closed:
                return
            if reason is not None:
                self._lose(reason)
                return

    def _look(self) -> str | None:
        """Wait a moment for messages. Returns why a rank is lost, or None."""
        by_connection = {connection: rank for rank, connection in self._connections.items()}
        try:
            ready = wait(list(by_connection), _LOOK_SECONDS)
        except OSError:
            assert self._closed, "only close closes connections"
            return None
        for connection in ready:
            assert isinstance(connection, Connection)
            rank = by_connection[connection]
            try:
                message = connection.recv()
            except (EOFError, OSError):
                return f"rank {rank} {self._how_ended(rank)}"
            if message is READY:
                self._ready[rank] = True
            elif isinstance(message, Alive):
                self._busy[rank] = message.busy_at
            else:
                return f"rank {rank} has failed: {message}"
            self._heard[rank] = time.monotonic()
        now = time.monotonic()
        for rank, heard in self._heard.items():
            if now - heard > _SILENT_SECONDS:
                return f"rank {rank} has not answered for {_SILENT_SECONDS:.0f} seconds"
        since = self._since
        if self._gpu and since is not None and now - since > _STEP_SECONDS:
            return f"a step has not ended after {_STEP_SECONDS:.0f} seconds: {self._holding()}"
        return None

    def _holding(self) -> str:
        """Describe which ranks delay a step."""
        busy = {0: busy_at(self._stepping), **self._busy}
        named = [
            f"rank {rank} is at {activity}"
            for rank, activity in busy.items()
            if activity is not None
        ]
        return " and ".join(named) or "all ranks wait for their devices"

    def _how_ended(self, rank: int) -> str:
        """Say how the process of a rank ended, whose connection is closed."""
        try:
            code = self._processes[rank].wait(_LEAVE_SECONDS)
        except subprocess.TimeoutExpired:
            return "has closed its connection"
        return f"was ended by signal {-code}" if code < 0 else f"has ended with exit code {code}"

    def _lose(self, reason: str) -> None:
        """End all ranks, and make sure that this process does not wait for them."""
        self._reason = (
            f"tensor parallel: {reason}, so no further step can be computed; finished rows are safe"
        )
        _kill(self._processes)
        if self._gpu:
            # A kernel may wait for that rank for ever, which must not delay the end of this
            # process.
            atexit.register(end_process, 1)
        if self._since is None or self._left.wait(_LEAVE_SECONDS):
            return
        leave()  # This ends sums that wait for other ranks.
        if self._left.wait(_LEAVE_SECONDS) or self._closed:
            return
        print(f"batchgen: {self._reason}", file=sys.stderr, flush=True)
        os._exit(1)


def _pickled(setup: object) -> bytes:
    """Pickle what is sent to other processes. Raises ValueError if they could not unpickle it."""
    try:
        message = pickle.dumps(setup)
    except (pickle.PicklingError, AttributeError, TypeError) as error:
        raise ValueError(
            f"tensor_parallel: the engine cannot be sent to the other ranks: {error}"
        ) from error
    if b"__main__" in message:
        raise ValueError(
            "tensor_parallel: the other ranks do not import the main module, and part of the "
            "engine, such as its strategy, is defined there: put it in a module of its own"
        )
    return message


def _is_own(error: Exception) -> bool:
    """Return whether an error is a user's mistake that rank 0 has detected by itself."""
    return isinstance(error, ValueError) and not isinstance(error, UnicodeError)


def _end(
    processes: dict[int, subprocess.Popen[bytes]], connections: dict[int, Connection[Any, Any]]
) -> None:
    """Close the connections, which makes the ranks end, and kill ranks that do not end in time."""
    for connection in connections.values():
        connection.close()
    deadline = time.monotonic() + _END_SECONDS
    for process in processes.values():
        try:
            process.wait(max(0.0, deadline - time.monotonic()))
        except subprocess.TimeoutExpired:
            break
    _kill(processes)


def _kill(processes: dict[int, subprocess.Popen[bytes]]) -> None:
    for process in processes.values():
        process.kill()
    for process in processes.values():
        process.wait()
