"""SIGINT and SIGTERM: the first stops a job cleanly, the second at once."""

import os
import signal
import sys
import threading
import time
from types import FrameType
from typing import Self

# One Ctrl-C or one `timeout` can reach a process twice, directly and through its group.
_SAME_SIGNAL_SECONDS = 0.3


class JobStopped(BaseException):
    """Raised by a first signal where a job can be left at any point.

    Like KeyboardInterrupt not an Exception, so that no library takes it for an error of its own.
    """


class StopSignals:
    """Handles SIGINT and SIGTERM while entered (in the main thread; elsewhere it does nothing).

    Attributes:
        received: number of the first signal, or None.
        deferred: False: the first signal raises JobStopped wherever the program is. True: it only
            sets `received`, which is then to be looked at often.
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
