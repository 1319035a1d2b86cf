"""Images are decoded before their turn, a bounded number at a time."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable

import numpy as np
import pytest

from batchgen.engine.interface.outputs import RequestError
from batchgen.engine.vision.image import Pixels
from batchgen.inputs.images.decode_ahead import DecodeAhead


class Decoder:
    """Decodes numbered images; counts how many are decoded and held."""

    def __init__(self) -> None:
        self.done: list[int] = []
        self._lock = threading.Lock()

    def of(self, number: int) -> Callable[[], Pixels]:
        def decode() -> Pixels:
            with self._lock:
                self.done.append(number)
            if number < 0:
                raise RequestError("bad_image", "damaged")
            return np.full((1, 1, 3), number, np.uint8)

        return decode

    def wait_for(self, count: int) -> None:
        end = time.monotonic() + 10
        while len(self.done) < count and time.monotonic() < end:
            time.sleep(0.001)
        assert len(self.done) == count


def test_images_come_in_order_a_bounded_number_ahead() -> None:
    decoder, ahead = Decoder(), DecodeAhead(2, 3)
    images = [ahead.add(decoder.of(i)) for i in range(10)]
    decoder.wait_for(3)
    time.sleep(0.01)
    assert sorted(decoder.done) == [0, 1, 2]
    for number, image in enumerate(images):
        assert image()[0, 0, 0] == number
        decoder.wait_for(min(10, number + 4))
    assert sorted(decoder.done) == list(range(10))
    assert images[4]()[0, 0, 0] == 4 and len(decoder.done) == 11  # a row that was preempted
    ahead.close()


def test_an_image_out_of_turn_and_one_that_nobody_wants() -> None:
    decoder, ahead = Decoder(), DecodeAhead(1, 2)
    images = [ahead.add(decoder.of(i)) for i in range(6)]
    decoder.wait_for(2)
    assert images[5]()[0, 0, 0] == 5  # decoded by the one who asks
    del images[0], images[0]  # a prefix hit: their places are given back
    decoder.wait_for(5)
    assert sorted(decoder.done) == [0, 1, 2, 3, 5]
    ahead.close()
    assert images[2]()[0, 0, 0] == 4


def test_an_error_is_told_to_the_one_who_asks() -> None:
    decoder, ahead = Decoder(), DecodeAhead(1, 2)
    image, other = ahead.add(decoder.of(-1)), ahead.add(decoder.of(7))
    for _ in range(2):
        with pytest.raises(RequestError, match="damaged"):
            image()
    assert other()[0, 0, 0] == 7
    ahead.close()
