"""Decodes images in threads before the engine needs them, a limited number at a time. `RowImages`
uses `DecodeAhead`."""

from __future__ import annotations

import threading
import weakref
from collections import deque
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor

from batchgen.engine.vision.image import Pixels

Decode = Callable[[], Pixels]
"""Returns the pixels of an image, or raises RequestError."""


class DecodeAhead:
    """Threads that decode images in the order in which they were added.

    At most `limit` images are decoded and not yet taken, so memory stays constant however many rows
    wait. An image that is taken before its turn, or a second time, is decoded by the caller's
    thread. An image that is no longer referenced leaves the queue.
    """

    def __init__(self, threads: int, limit: int) -> None:
        self._pool = ThreadPoolExecutor(threads, "images")
        self._limit = limit
        self._lock = threading.RLock()  # reentrant: dropping an image needs it, too
        self._waiting: deque[weakref.ref[AheadPixels]] = deque()
        self._begun = 0  # images whose decoding has started and that are not yet taken

    def add(self, decode: Decode) -> AheadPixels:
        """Queue an image. Returns a callable for its pixels."""
        pixels = AheadPixels(self, decode)
        with self._lock:
            self._waiting.append(weakref.ref(pixels))
            self._fill()
        return pixels

    def close(self) -> None:
        """Drop all queued images, and stop the threads."""
        with self._lock:
            self._waiting.clear()
        self._pool.shutdown(wait=False, cancel_futures=True)

    def _fill(self) -> None:
        """Start to decode queued images while there is room. The caller holds the lock."""
        while self._begun < self._limit and self._waiting:
            pixels = self._waiting.popleft()()
            if pixels is None or pixels.taken:
                continue
            self._begun += 1
            pixels.future = self._pool.submit(pixels.decode)
            # Runs `_give_back` once: when `take` calls it, or when the image is garbage collected.
            pixels.place = weakref.finalize(pixels, self._give_back)
            pixels.place.atexit = False

    def _give_back(self) -> None:
        """Free the place of an image, and start to decode the next one."""
        with self._lock:
            self._begun -= 1
            self._fill()

    def take(self, pixels: AheadPixels) -> Future[Pixels] | None:
        """Mark an image as taken, and free its place. Returns its decoding; None if this was not
        started."""
        with self._lock:
            pixels.taken = True
            future, free_place = pixels.future, pixels.place
            pixels.future = pixels.place = None
            if free_place is not None:
                free_place()
            return future


class AheadPixels:
    """A callable that returns the pixels of one image, and decodes it unless a thread has done so.

    Attributes:
        taken: whether the pixels were asked for.
        future: the decoding, from its start until it is taken.
        place: frees the image's place among those that are decoded and not taken.
    """

    def __init__(self, ahead: DecodeAhead, decode: Decode) -> None:
        self._ahead, self.decode = ahead, decode
        self.taken = False
        self.future: Future[Pixels] | None = None
        self.place: weakref.finalize[[], AheadPixels] | None = None

    def __call__(self) -> Pixels:
        """Return the pixels. Raises RequestError if they cannot be decoded."""
        future = self._ahead.take(self)
        return self.decode() if future is None or future.cancelled() else future.result()
