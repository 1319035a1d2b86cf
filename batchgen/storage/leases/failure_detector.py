"""Decides by their heartbeats which workers are alive and which are dead (see
`lease_protocol.py`)."""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Mapping
from typing import Any

from batchgen.storage.leases.lease_files import WORKERS, parse_worker, worker_name
from batchgen.storage.leases.process_identity import is_gone, machine
from batchgen.storage.leases.store_operations import Names, Operation, Read


class FailureDetector:
    """Decides whether workers are dead, from the content of their heartbeats and this process's
    clock.

    A worker is dead if its heartbeat reports its end, if its process ran on this machine and has
    ended, or if its heartbeat has not changed for `stale_after` seconds. A worker that was paused
    is alive again with its next heartbeat. Clocks of other machines are never compared.
    """

    def __init__(
        self,
        stale_after: float,
        clock: Callable[[], float],
        is_gone: Callable[[Mapping[str, Any]], bool],
    ) -> None:
        """Create a detector.

        Args:
            stale_after: seconds without a change after which a worker is dead.
            clock: returns seconds; never goes back.
            is_gone: returns whether the process of a heartbeat is known to have ended.
        """
        self._stale_after = stale_after
        self._clock = clock
        self._is_gone = is_gone
        self._seen: dict[object, tuple[bytes | None, float]] = {}  # last content, and since when

    def is_dead(self, worker: int, content: bytes | None) -> bool:
        """Whether a worker is dead, given the present content of its heartbeat."""
        beat = read_beat(content)
        if beat is not None and (beat["ended"] is not None or self._is_gone(beat)):
            return True
        return self.stands_still(worker, content)

    def stands_still(self, what: object, content: bytes | None) -> bool:
        """Whether the content of an object has not changed for `stale_after` seconds. `what`
        identifies the object."""
        now = self._clock()
        last_content, since = self._seen.get(what, (None, None))
        if since is None or last_content != content:
            self._seen[what] = content, now
            return False
        return now - since >= self._stale_after

    def how_ended(self, content: bytes | None) -> str | None:
        """How a worker ended, by its last heartbeat; None if the heartbeat does not report an
        end."""
        beat = read_beat(content)
        return None if beat is None else beat["ended"]


def read_beat(content: bytes | None) -> dict[str, Any] | None:
    """Parse a heartbeat; None if it is empty, cut off or zeroed, as after a crash."""
    try:
        values = json.loads(content or b"")
    except (ValueError, RecursionError):
        return None
    is_beat = isinstance(values, dict) and isinstance(values.get("ended", 0), str | None)
    return values if is_beat else None


def any_lives(
    do: Callable[[Operation], Any], look_seconds: float, stale_after: float, *, here: bool
) -> bool:
    """Whether any worker of a folder is alive.

    A worker on another machine is alive if its heartbeat changes within `stale_after` seconds. The
    call waits that long, unless all workers have ended cleanly. With `here`, workers on this
    machine count as well.
    """
    names = [worker_name(n) for name in do(Names(WORKERS)) if (n := parse_worker(name))]
    contents = {name: content for name in names if (content := do(Read(name))) is not None}
    # A worker whose heartbeat cannot be read has not reported its end.
    beats = {name: read_beat(content) or {"ended": None} for name, content in contents.items()}
    running = {name: beat for name, beat in beats.items() if beat["ended"] is None}
    elsewhere = {name for name, beat in running.items() if beat.get("machine") != machine()}
    if here and any(not is_gone(running[name]) for name in running.keys() - elsewhere):
        return True
    deadline = time.monotonic() + stale_after
    while elsewhere and time.monotonic() < deadline:
        time.sleep(min(1.0, look_seconds))
        if any(do(Read(name)) != contents[name] for name in elsewhere):
            return True
    return False
