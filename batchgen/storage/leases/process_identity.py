"""Identifies the process of a worker, so that other workers on the same machine notice at once that
it has ended."""

from __future__ import annotations

import contextlib
import os
import socket
from collections.abc import Mapping
from functools import cache
from pathlib import Path
from typing import Any

_UNKNOWN = "running"  # in place of the start time of a process whose start time is hidden


@cache
def machine() -> str:
    """A text that identifies this machine.

    It is equal for two processes that can see whether the other one runs, because they share one
    boot of a kernel and one numbering of processes. A clone of a running machine differs in its
    name or in the addresses of its network cards.
    """
    try:
        boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
        texts = [boot, os.readlink("/proc/self/ns/pid"), socket.gethostname(), *_cards()]
        return " ".join(texts)
    except OSError:  # not Linux
        return socket.gethostname()


def _cards() -> list[str]:
    """The addresses of the network cards, without those of containers, which come and go."""
    cards = []
    for device in Path("/sys/class/net").glob("*/device"):
        with contextlib.suppress(OSError):  # the card was just removed
            cards.append((device.parent / "address").read_text().strip())
    return sorted(cards)


def started(pid: int) -> str | None:
    """The start time of a process of this machine, in clock ticks; None if it has ended.

    A process id may be used again, but then with another start time. If the system hides the start
    time of another user's process, this is `_UNKNOWN`.
    """
    try:
        stat = Path(f"/proc/{pid}/stat").read_text()
    except OSError:
        return _is_there(pid)
    # proc(5): after the name in brackets come the fields from the third on. The third is the state
    # (Z and X: ended), the 22nd the start time.
    fields = stat.rpartition(")")[2].split()
    return None if fields[0] in "ZX" else fields[22 - 3]


def process_identity() -> dict[str, Any]:
    """The entries of a heartbeat that identify this process."""
    pid = os.getpid()
    return {
        "host": socket.gethostname(),
        "pid": pid,
        "machine": machine(),
        "process_started": started(pid),
    }


def is_gone(beat: Mapping[str, Any]) -> bool:
    """Whether the process that wrote a heartbeat ran on this machine and has ended."""
    pid = beat.get("pid")
    if beat.get("machine") != machine() or not isinstance(pid, int):
        return False
    since = started(pid)
    return since is None or since not in (_UNKNOWN, beat.get("process_started"))


def _is_there(pid: int) -> str | None:
    """`_UNKNOWN` if a process runs; None if it has ended."""
    try:
        os.kill(pid, 0)
    except (ProcessLookupError, OverflowError):
        return None
    except PermissionError:
        pass
    return _UNKNOWN
