"""The thread that rewrites a worker's heartbeat, by which other workers see that it is alive."""

from __future__ import annotations

import json
import os
import signal
import threading
from collections.abc import Callable, Mapping
from typing import Any

from batchgen.storage.leases.file_store import FolderGone
from batchgen.storage.leases.lease_files import worker_name
from batchgen.storage.leases.store_operations import Operation, Overwrite
from batchgen.util.errors import JobError

LAUNCHER = "BATCHGEN_LAUNCHER"
"""The environment variable with the process id of the launcher. The worker ends when that process
ends."""


class Heartbeat:
    """Rewrites `workers/0007.json` every few seconds, in a thread, until the worker ends.

    If the process is paused or its machine fails, the file stops changing.

    Attributes:
        facts: more entries of the file; the main thread replaces the whole mapping.
    """

    def __init__(
        self,
        number: int,
        seconds: float,
        identity: Mapping[str, Any],
        do: Callable[[Operation], Any],
    ) -> None:
        self.facts: Mapping[str, Any] = {}
        self._number = number
        self._identity = identity
        self._do = do
        self._beats = 0
        self._seconds = seconds
        self._lock = threading.Lock()
        self._ends = threading.Event()
        self._thread = threading.Thread(target=self._run, name="heartbeat", daemon=True)

    def start(self) -> None:
        self._thread.start()

    def beat(self) -> None:
        """Write the file now."""
        with self._lock:
            if not self._ends.is_set():
                self._write(None)

    def end(self, how: str | None) -> None:
        """Stop. Write into the file `how` the worker ended, unless that is None."""
        with self._lock:
            if self._ends.is_set():
                return
            self._ends.set()
            if how is not None:
                self._write(how)
        if self._thread.is_alive():
            self._thread.join()

    def _run(self) -> None:
        while not self._ends.wait(self._seconds):
            self.beat()
            _end_with_launcher()

    def _write(self, ended: str | None) -> None:
        self._beats += 1
        content = encoded(self._identity, self._number, self._beats, ended, self.facts)
        try:
            self._do(Overwrite(worker_name(self._number), content))
        except (FolderGone, JobError):
            # The job is complete, or the disk is full or missing. A later beat may succeed; if none
            # does, other workers take over.
            pass


def encoded(
    identity: Mapping[str, Any],
    number: int,
    beats: int,
    ended: str | None,
    facts: Mapping[str, Any],
) -> bytes:
    """The content of a heartbeat. `ended` is `complete`, `stopped` or `failed`; None while the
    worker runs."""
    beat = {"worker": number, **identity, "beats": beats, "ended": ended, **facts}
    return json.dumps(beat).encode()


def _end_with_launcher() -> None:
    """Stop this process by SIGTERM, which ends a worker like Ctrl-C, if its launcher has ended."""
    launcher = os.environ.get(LAUNCHER)
    if launcher is not None and os.getppid() != int(launcher):
        del os.environ[LAUNCHER]
        os.kill(os.getpid(), signal.SIGTERM)
