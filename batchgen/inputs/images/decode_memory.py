"""Bounds the memory that decoding images takes over all threads of a job."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager

MOST_MEMORY = 2 << 30
"""Bytes. The largest file and the most pixels of an image have room in it."""


class DecodeMemory:
    """Lets threads go on as long as what they hold together fits into `most` bytes."""

    def __init__(self, limit: int = MOST_MEMORY) -> None:
        self._most = self._free = limit
        self._turn = threading.Lock()  # who waits for much is not passed by others for ever
        self._change = threading.Condition()

    @contextmanager
    def hold(self, size: int) -> Iterator[None]:
        """Wait for `size` bytes, and hold them; what is larger than all bytes waits for all."""
        size = min(size, self._most)
        with self._turn, self._change:
            self._change.wait_for(lambda: self._free >= size)
            self._free -= size
        try:
            yield
        finally:
            with self._change:
                self._free += size
                self._change.notify()
