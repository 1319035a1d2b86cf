"""The process of a rank behind rank 0.

    python -c PROGRAM FD RANK      (see rank_processes.py)

It talks over the socket FD. It gets the process id of rank 0 and then the engine to make, and after
that the commands of `replicas`. It sends READY when it can join the others, `Alive` every second,
and a text if it fails. It ends when rank 0 does, however that ends.
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
    """Be a rank until rank 0 closes the socket or is gone."""
    connection: Connection[Any, Any] = Connection(int(sys.argv[1]))
    rank = int(sys.argv[2])
    # Signals reach the whole process group. Rank 0 decides what becomes of the others.
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
    # Threads and the memory of a GPU that waits for other ranks must not hold the process up.
    os._exit(code)


def _beat(connection: Connection[Any, Any], sending: threading.Lock, parent: int) -> None:
    """Say that this rank is alive, and end it when rank 0 is gone, whatever it is doing."""
    main = threading.main_thread().ident
    while os.getppid() == parent:
        alive = Alive(busy_at(main))
        try:
            with sending:
                connection.send(alive)
        except OSError:
            # Rank 0 has closed the socket. The main thread has time to end by itself.
            time.sleep(5 * BEAT_SECONDS)
            break
        time.sleep(BEAT_SECONDS)
    os._exit(1)


def _report(connection: Connection[Any, Any], sending: threading.Lock, error: Exception) -> None:
    """Tell rank 0 of an error, and the user where it came from."""
    time.sleep(BEAT_SECONDS)  # until rank 0 has closed its end, if it has failed itself
    try:
        with sending:
            connection.send(f"{type(error).__name__}: {error}")
    except OSError:
        return
    traceback.print_exception(error)
