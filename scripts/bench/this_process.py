"""The age and the memory of the running process, as Linux tells them in /proc/self."""

from __future__ import annotations

import os
import time
from pathlib import Path


def process_age() -> float:
    """Return the seconds since this process started, start of the interpreter included.

    The start is known to 10 ms.
    """
    # The command's name, in parentheses, may hold spaces; starttime is field 22, this is from 3.
    fields = Path("/proc/self/stat").read_text().rpartition(")")[2].split()
    started = int(fields[19]) / os.sysconf("SC_CLK_TCK")
    return time.clock_gettime(time.CLOCK_BOOTTIME) - started


def resident_mib() -> float:
    """Return the MiB of memory that this process holds now."""
    pages = int(Path("/proc/self/statm").read_text().split()[1])
    return pages * os.sysconf("SC_PAGE_SIZE") / 2**20
