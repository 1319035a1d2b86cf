"""A picture of a request, as the engine takes it: decoded, scaled and known by a digest."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field, replace

import numpy as np
import numpy.typing as npt

Pixels = npt.NDArray[np.uint8]
"""The red, green and blue values of a picture, [height, width, 3]."""

DIGEST_BYTES = 32


@dataclass(frozen=True, slots=True)
class Image:
    """A picture whose pixels may be decoded as late as the engine needs them.

    Height and width are in pixels, and multiples of the model's `VisionConfig.pixels_per_token`.
    Two images with one digest count as the same picture, so it must cover the bytes of the file,
    everything that decodes and scales them, and the size.
    """

    # The pixels, or what gives them and raises RequestError if they cannot be decoded.
    pixels: Pixels | Callable[[], Pixels] = field(repr=False, compare=False)
    height: int
    width: int
    digest: bytes

    def __post_init__(self) -> None:
        assert self.height > 0 and self.width > 0 and len(self.digest) == DIGEST_BYTES

    def without_pixels(self) -> Image:
        """Return the image as another process knows it, which gets the pixels otherwise."""
        return replace(self, pixels=_elsewhere)

    def load(self) -> Pixels:
        """Return the pixels. Raises RequestError if they cannot be decoded."""
        pixels = self.pixels() if callable(self.pixels) else self.pixels
        assert pixels.shape == (self.height, self.width, 3) and pixels.dtype == np.uint8
        return pixels


def _elsewhere() -> Pixels:
    raise AssertionError("the pixels are in another process")
