"""An image of a request as the engine receives it: `Image`, with its size and a digest of its
contents."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field, replace

import numpy as np
import numpy.typing as npt

Pixels = npt.NDArray[np.uint8]
"""The red, green and blue values of an image, [height, width, 3]."""

DIGEST_BYTES = 32
"""The length of an image's digest (BLAKE2b)."""


@dataclass(frozen=True, slots=True)
class Image:
    """An image whose pixels may be decoded only when the engine needs them.

    Height and width are in pixels, and multiples of the model's `VisionConfig.pixels_per_token`.
    Two images with equal digests count as the same image. The digest must therefore cover the
    file's bytes, all settings of decoding and scaling, and the size.
    """

    # The pixels, or a function that decodes them, which raises RequestError if it cannot.
    pixels: Pixels | Callable[[], Pixels] = field(repr=False, compare=False)
    height: int
    width: int
    digest: bytes

    def __post_init__(self) -> None:
        assert self.height > 0 and self.width > 0 and len(self.digest) == DIGEST_BYTES

    def without_pixels(self) -> Image:
        """Return a copy for another process, which receives the pixels in another way."""
        return replace(self, pixels=_elsewhere)

    def load(self) -> Pixels:
        """Return the pixels. Raises RequestError if they cannot be decoded."""
        pixels = self.pixels() if callable(self.pixels) else self.pixels
        assert pixels.shape == (self.height, self.width, 3) and pixels.dtype == np.uint8
        return pixels


def _elsewhere() -> Pixels:
    raise AssertionError("the pixels are in another process")
