"""Repeats operations on files that fail for a moment on a network file system."""

from __future__ import annotations

import errno
import time
from collections.abc import Callable
from typing import TypeVar

_PASSING = (errno.ESTALE, errno.EIO, errno.ETIMEDOUT, errno.EAGAIN)
"""The errors of NFS if a file was replaced while it was opened, or if the server was away."""
_PAUSES = (0.02, 0.1, 0.5, 1.0)
T = TypeVar("T")


def patiently(act: Callable[[], T]) -> T:
    """Call a repeatable function, up to a few times if the file server fails; then raise its
    OSError."""
    for pause in _PAUSES:
        try:
            return act()
        except OSError as error:
            if error.errno not in _PASSING:
                raise
        time.sleep(pause)
    return act()
