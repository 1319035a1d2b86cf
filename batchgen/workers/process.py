"""Which process a worker is, so that others on the same machine see at once that it is gone."""

from __future__ import annotations

import os
import socket
from collections.abc import Mapping
from functools import cache
from pathlib import Path
from typing import Any


@cache
def machine() -> str:
    """A text that two processes share if each can see whether the other runs: they have the same
    kernel since its start, and the same numbering of processes."""
    try:
        boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
        return f"{boot} {os.readlink('/proc/self/ns/pid')}"
    except OSError:  # no Linux
        return socket.gethostname()


def started(pid: int) -> str | None:
    """When a process of this machine was started, in the system's own unit; None if it is gone.

    A number of a process may be given again; then it has started at another time.
    """
    try:
        stat = Path(f"/proc/{pid}/stat").read_text()
    except (FileNotFoundError, ProcessLookupError):
        return None if Path("/proc/self").exists() else _is_there(pid)
    fields = stat.rpartition(")")[2].split()
    return None if fields[0] in "ZX" else fields[19]


def identity() -> dict[str, Any]:
    """What tells this process from all others, for its heartbeat."""
    pid = os.getpid()
    return {
        "host": socket.gethostname(),
        "pid": pid,
        "machine": machine(),
        "process_started": started(pid),
    }


def is_gone(beat: Mapping[str, Any]) -> bool:
    """Whether the process that wrote a heartbeat ran on this machine and does not any more."""
    return bool(beat["machine"] == machine() and started(beat["pid"]) != beat["process_started"])


def _is_there(pid: int) -> str | None:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return None
    except PermissionError:
        pass
    return "running"
