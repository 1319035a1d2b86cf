"""The main program of the process of a rank other than 0.

    python -c PROGRAM FD RANK      (see rank_processes.py)

It communicates over the socket FD. It receives the process id of rank 0, the engine to make, and
then the commands of `replicas`. It sends READY when it can join the others, `Alive` every second,
and a text if it fails. It ends when rank 0 ends, for whatever reason.
"""

from __future__ import annotations

import os
import pickle
import signal
import sys
import threading
import time
import traceback
from multiprocessing.connection import Connection
from typing import Any

from batchgen.engine.parallel.place import busy_at
from batchgen.engine.parallel.rank_group import DistributedGroup, join_store
from batchgen.engine.parallel.rank_processes import BEAT_SECONDS, READY, Alive
from batchgen.engine.parallel.tensor_parallel import TensorParallel


def main() -> None:
    """Run a rank until rank 0 closes the socket or ends."""
    connection: Connection[Any, Any] = Connection(int(sys.argv[1]))
    rank = int(sys.argv[2])
    # Signals reach the whole process group, but rank 0 decides what happens to the others.
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, signal.SIG_IGN)
    parent: int = connection.recv()
    sending = threading.Lock()
    threading.Thread(target=_beat, args=(connection, sending, parent), daemon=True).start()
    code = 0
    try:
        size, port, device, recipe = pickle.loads(connection.recv_bytes())
        with sending:
            connection.send(READY)
        group = DistributedGroup(rank, size, join_store(port), device)
        recipe.follow(TensorParallel(rank, size, group), connection)
    except (EOFError, ConnectionResetError):
        pass
    except Exception as error:
        code = 1
        _report(connection, sending, error)
    # Do not wait for threads or for a GPU that waits for other ranks.
    os._exit(code)


def _beat(connection: Connection[Any, Any], sending: threading.Lock, parent: int) -> None:
    """Report regularly that this rank is alive. End it, whatever it is doing, when rank 0 has
    ended."""
    main = threading.main_thread().ident
    while os.getppid() == parent:
        alive = Alive(busy_at(main))
        try:
            with sending:
                connection.send(alive)
        except OSError:
            # Rank 0 has closed the socket. Give the main thread time to end by itself.
            time.sleep(5 * BEAT_SECONDS)
            break
        time.sleep(BEAT_SECONDS)
    os._exit(1)


def _report(connection: Connection[Any, Any], sending: threading.Lock, error: Exception) -> None:
    """Report an error to rank 0, and print its traceback."""
    time.sleep(BEAT_SECONDS)  # until rank 0 has closed its end, if it has failed, too
    try:
        with sending:
            connection.send(f"{type(error).__name__}: {error}")
    except OSError:
        return
    traceback.print_exception(error)
