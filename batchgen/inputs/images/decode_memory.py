"""Bounds the memory that decoding images takes over all threads of a job."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager

MOST_MEMORY = 2 << 30
"""Bytes. The largest file and the most pixels of an image have room in it."""


class DecodeMemory:
    """Limits the memory that all threads hold together to `limit` bytes."""

    def __init__(self, limit: int = MOST_MEMORY) -> None:
        self._most = self._free = limit
        self._turn = threading.Lock()  # so that a thread that needs much is not overtaken for ever
        self._change = threading.Condition()

    @contextmanager
    def hold(self, size: int) -> Iterator[None]:
        """Wait for `size` bytes, and hold them within the context. A size above the limit counts as
        the limit."""
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
