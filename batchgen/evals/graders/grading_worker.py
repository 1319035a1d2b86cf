"""The program of a worker process of `grading_pool.py`: calls one function for one item after
another.

    python -c PROGRAM FD

It communicates over the socket FD. First it receives the function and the limit of its memory, and
sends READY when it can begin. Then it receives lists of items, and sends (True, result) or (False,
(type, message)) for each item.
"""

from __future__ import annotations

import ctypes
import os
import pickle
import resource
import signal
import sys
from collections.abc import Callable
from multiprocessing.connection import Connection
from typing import Any

from batchgen.evals.graders.step import GradeFailure

# The message of a process that has prepared, before any result.
READY = "ready"
# The number of the option of prctl(2) by which the parent's death sends a signal.
_PR_SET_PDEATHSIG = 1


def main() -> None:
    """Serve until the parent closes the socket or has ended."""
    connection: Connection[Any, Any] = Connection(int(sys.argv[1]))
    setup = connection.recv_bytes()
    # Ctrl-C reaches the whole process group, but the parent decides when its workers end.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    parent, memory_bytes, function, prepare = pickle.loads(setup)
    die_with(parent)
    if prepare is not None:
        prepare()
    _, hard = resource.getrlimit(resource.RLIMIT_AS)
    resource.setrlimit(resource.RLIMIT_AS, (memory_bytes, hard))
    try:
        connection.send(READY)
        while True:
            for item in connection.recv():
                if not _answer(connection, function, item):
                    return
    except (EOFError, BrokenPipeError, ConnectionResetError):
        return


def _answer(connection: Connection[Any, Any], function: Callable[[Any], Any], item: Any) -> bool:
    """Send the result of the function for an item. Returns whether the process can continue."""
    try:
        reply = (True, function(item))
    except MemoryError:
        connection.send((False, ("memory", "it needs more memory than a worker may have")))
        return False
    except GradeFailure as failure:
        reply = (False, (failure.type, str(failure)))
    # An error of a library must cost only the answer that causes it.
    except Exception as error:
        reply = (False, ("failed", f"{type(error).__name__}: {error}"[:500]))
    connection.send(reply)
    return True


def die_with(parent: int) -> None:
    """Make the kernel (Linux) kill this process when its parent ends, even if a call never
    returns.

    Args:
        parent: the id of the process that started this one.
    """
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != parent:  # it ended before the kernel knew
        sys.exit(0)
