"""Decodes images in threads before the engine needs them, a bounded number at a time."""

from __future__ import annotations

import threading
import weakref
from collections import deque
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor

from batchgen.engine.vision.image import Pixels

Decode = Callable[[], Pixels]
"""Gives the pixels of an image, or raises RequestError."""


class DecodeAhead:
    """Threads that decode images in the order in which rows were read.

    At most `most` images are decoded and not yet taken, so memory stays flat however many rows
    wait. An image that is asked for before its turn is decoded at once by the one who asks, and so
    is one that is asked for again. An image that is no longer referenced is removed from the queue.
    """

    def __init__(self, threads: int, limit: int) -> None:
        self._pool = ThreadPoolExecutor(threads, "images")
        self._most = limit
        self._lock = threading.RLock()  # images may be dropped while it is held
        self._waiting: deque[weakref.ref[AheadPixels]] = deque()
        self._begun = 0

    def add(self, decode: Decode) -> AheadPixels:
        """Queue an image."""
        pixels = AheadPixels(self, decode)
        with self._lock:
            self._waiting.append(weakref.ref(pixels))
            self._fill()
        return pixels

    def close(self) -> None:
        """Stop the threads."""
        with self._lock:
            self._waiting.clear()
        self._pool.shutdown(wait=False, cancel_futures=True)

    def _fill(self) -> None:
        while self._begun < self._most and self._waiting:
            pixels = self._waiting.popleft()()
            if pixels is None or pixels.taken:
                continue
            self._begun += 1
            pixels.future = self._pool.submit(pixels.decode)
            pixels.place = weakref.finalize(pixels, self._give_back)
            pixels.place.atexit = False

    def _give_back(self) -> None:
        with self._lock:
            self._begun -= 1
            self._fill()

    def take(self, pixels: AheadPixels) -> Future[Pixels] | None:
        """The decoding that was begun for an image, whose place in the queue becomes free; None if
        none was begun."""
        with self._lock:
            pixels.taken = True
            future, index = pixels.future, pixels.place
            pixels.future = pixels.place = None
            if index is not None:
                index()
            return future


class AheadPixels:
    """Returns the pixels of one image, decoding it now unless that has been done ahead."""

    def __init__(self, ahead: DecodeAhead, decode: Decode) -> None:
        self._ahead, self.decode = ahead, decode
        self.taken = False
        self.future: Future[Pixels] | None = None
        self.place: weakref.finalize[[], AheadPixels] | None = None

    def __call__(self) -> Pixels:
        """The pixels. Raises RequestError if they cannot be decoded."""
        future = self._ahead.take(self)
        return self.decode() if future is None or future.cancelled() else future.result()
