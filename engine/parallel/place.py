"""Names the line of code that a thread is at, for messages about ranks that hang. `rank_main.py`
and `rank_processes.py` call `busy_at`."""

from __future__ import annotations

import sys
from pathlib import Path

_WAITS = {
    "Download.wait",
    "DistributedGroup.agree",
    "DistributedGroup.least",
    "DistributedGroup._gathered",
    "follow_engine",
}
"""The functions that wait for a device, for the next step or, on a CPU, for other ranks."""
_PROGRAM = str(Path(__file__).parents[2])


def busy_at(thread: int | None) -> str | None:
    """Return the innermost line of this program that a thread is at, as its file, line number and
    function. Returns None if the thread is waiting there for a device or other ranks, or is outside
    this program."""
    frame = None if thread is None else sys._current_frames().get(thread)
    while frame is not None and not frame.f_code.co_filename.startswith(_PROGRAM):
        frame = frame.f_back
    if frame is None or frame.f_code.co_qualname in _WAITS:
        return None
    return f"{Path(frame.f_code.co_filename).name}:{frame.f_lineno} ({frame.f_code.co_name})"
