"""Handles SIGINT and SIGTERM: the first signal stops a job cleanly, a second one ends the process
at once."""

import os
import signal
import sys
import threading
import time
from types import FrameType
from typing import Self

_SAME_SIGNAL_SECONDS = 0.3
"""A second signal within this time counts as the first. Ctrl-C and the command `timeout` can send a
signal to a process twice: directly, and through the process group."""


class JobStopped(BaseException):
    """Raised by the first signal while it is safe to leave the job at any point.

    Like KeyboardInterrupt it is not an Exception, so that libraries do not handle it as an error.
    """


class StopSignals:
    """A context that handles SIGINT and SIGTERM.

    Only the main thread of a process can handle signals; in other threads the context does nothing.

    Attributes:
        received: the number of the first signal; None before it.
        deferred: if False, the first signal raises JobStopped wherever the program is. If True, it
            only sets `received`, which the program must then check regularly.
    """

    def __init__(self) -> None:
        self.received: int | None = None
        self.deferred = False
        self._received_at = 0.0
        self._previous: dict[int, signal._HANDLER] = {}

    def __enter__(self) -> Self:
        if threading.current_thread() is threading.main_thread():
            for number in (signal.SIGINT, signal.SIGTERM):
                self._previous[number] = signal.signal(number, self._handle)
        return self

    def __exit__(self, *_: object) -> None:
        for number, handler in self._previous.items():
            signal.signal(number, handler)

    def _handle(self, number: int, frame: FrameType | None) -> None:
        if self.received is not None:
            if time.monotonic() - self._received_at > _SAME_SIGNAL_SECONDS:
                os.write(sys.__stderr__.fileno() if sys.__stderr__ else 2, b"\nstopped at once\n")
                os._exit(128 + number)
            return
        self.received = number
        self._received_at = time.monotonic()
        if not self.deferred:
            raise JobStopped
