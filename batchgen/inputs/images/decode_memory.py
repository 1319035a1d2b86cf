"""Bounds the memory that decoding images takes over all threads of a job."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager

MOST_MEMORY = 2 << 30
"""The default limit in bytes (2 GiB), enough for the largest file and the most pixels that are
accepted (`image_sources.MOST_BYTES`, `decode_image.MOST_PIXELS`)."""


class DecodeMemory:
    """Limits the memory that all threads hold together to `limit` bytes."""

    def __init__(self, limit: int = MOST_MEMORY) -> None:
        self._limit = self._free = limit
        # Held by the one thread that waits for memory, so that threads get it in turn and one that
        # needs much is not overtaken for ever.
        self._turn = threading.Lock()
        self._change = threading.Condition()  # guards _free

    @contextmanager
    def hold(self, size: int) -> Iterator[None]:
        """Wait for `size` bytes, and hold them within the context. A size above the limit counts as
        the limit."""
        size = min(size, self._limit)
        with self._turn, self._change:
            self._change.wait_for(lambda: self._free >= size)
            self._free -= size
        try:
            yield
        finally:
            with self._change:
                self._free += size
                self._change.notify()
