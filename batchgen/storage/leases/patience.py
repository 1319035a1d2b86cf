"""Repeats operations on files that fail for a moment on a network file system."""

from __future__ import annotations

import errno
import time
from collections.abc import Callable
from typing import TypeVar

_PASSING = (errno.ESTALE, errno.EIO, errno.ETIMEDOUT, errno.EAGAIN)
"""The errors of NFS if a file was replaced while it was opened, or if the server did not answer."""
_PAUSES = (0.02, 0.1, 0.5, 1.0)
"""Seconds to wait after each attempt that failed; the attempt after the last one is final."""
T = TypeVar("T")


def patiently(act: Callable[[], T]) -> T:
    """Call a function that may be called again, up to five times while the file server fails, and
    return its result.

    Raises:
        OSError: the error of the last attempt, or an error that does not pass.
    """
    for pause in _PAUSES:
        try:
            return act()
        except OSError as error:
            if error.errno not in _PASSING:
                raise
        time.sleep(pause)
    return act()
