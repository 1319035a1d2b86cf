"""Reads the sizes of image files from their headers, and decodes images to pixels, with Pillow.
`RowImages` uses this."""

from __future__ import annotations

import io
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from importlib.util import find_spec
from typing import TYPE_CHECKING, BinaryIO, Literal

import numpy as np

from batchgen.engine.interface.outputs import RequestError
from batchgen.engine.vision.image import Pixels
from batchgen.util.errors import ConfigError

if TYPE_CHECKING:
    from PIL import Image as Pillow

Resampling = Literal["BICUBIC", "BILINEAR"]
FORMATS = ("PNG", "JPEG", "WEBP", "GIF", "BMP", "TIFF")
"""The formats that are read. Pillow's other formats are rare, or start programs (EPS)."""
MOST_PIXELS = 100_000_000
"""The maximum number of pixels of a file, because a header may claim any number."""
_BAND_PIXELS = 1 << 20
"""The number of pixels that are converted to RGB at a time."""
_BYTES_PER_PIXEL = 16
"""The peak memory for decoding WebP, at 4 bytes for a pixel of each of its two canvases, a copy and
the image; other formats take less."""
_ORIENTATION = 0x0112
"""The EXIF tag with the orientation of the camera."""
_SIXTEEN_BITS = ("I;16", "I;16L", "I;16B", "I;16N")
"""Pillow's modes of grey images with 16 bits."""
_TURNS = {
    2: "FLIP_LEFT_RIGHT", 3: "ROTATE_180", 4: "FLIP_TOP_BOTTOM", 5: "TRANSPOSE",
    6: "ROTATE_270", 7: "TRANSVERSE", 8: "ROTATE_90",
}  # fmt: skip
"""EXIF orientation → Pillow's name of the transposition that makes the image upright."""


def pillow_version() -> str:
    """The version of Pillow. Raises ConfigError if it is not installed."""
    try:
        import PIL
    except ModuleNotFoundError:
        raise ConfigError(
            "images are read with Pillow, which is not installed: pip install 'batchgen[images]'"
        ) from None
    return PIL.__version__


def has_pillow() -> bool:
    """Whether Pillow is installed."""
    return find_spec("PIL") is not None


def image_size(data: bytes | BinaryIO) -> tuple[int, int]:
    """Return the height and width of an upright image, from its header.

    Raises:
        RequestError: the file is not an image of FORMATS, or has more than MOST_PIXELS
            (`bad_image`).
    """
    with _opened(data) as image:
        width, height = image.size
        sides_swapped = _turn(image) >= 5  # EXIF orientations 5 to 8 turn the image by 90°
        return (width, height) if sides_swapped else (height, width)


def decoding_bytes(height: int, width: int) -> int:
    """Return the maximum memory that `decode_image` takes for an image of this size, without the
    file."""
    return _BYTES_PER_PIXEL * (height * width + 2 * _BAND_PIXELS)


def decode_image(
    data: bytes, height: int, width: int, resampling: Resampling = "BICUBIC"
) -> Pixels:
    """Decode an image: upright, on a white background, and resized to [height, width, 3] uint8.

    An animated image yields its first frame. Of values with 16 bits, the upper 8 are used. Resizing
    is Pillow's, as in transformers' processors that use Pillow.

    Raises:
        RequestError: the file is damaged, or its values are not colours (`bad_image`).
    """
    from PIL import Image as pillow

    with _opened(data) as file:
        file.load()
        turn = _turn(file)
        image = _in_colour(file)
        if image is not file:
            file.close()  # its pixels are not needed any longer
        if turn in _TURNS:
            image = image.transpose(pillow.Transpose[_TURNS[turn]])
        if image.size != (width, height):
            image = image.resize((width, height), pillow.Resampling[resampling])
        return np.array(image)  # a copy that can be written to, as torch wants it


@contextmanager
def _opened(data: bytes | BinaryIO) -> Iterator[Pillow.Image]:
    """Open an image within the context. Pillow's errors become RequestError, also those from the
    body."""
    from PIL import Image as pillow
    from PIL import UnidentifiedImageError

    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # Pillow warns about images that it can read
            file = io.BytesIO(data) if isinstance(data, bytes) else data
            with pillow.open(file, formats=FORMATS) as image:
                if image.width * image.height > MOST_PIXELS:
                    raise RequestError(
                        "bad_image",
                        f"the image has {image.width}×{image.height} pixels, and at most "
                        f"{MOST_PIXELS:,} are read: scale it down",
                    )
                yield image
    except UnidentifiedImageError:
        raise RequestError(
            "bad_image", f"the file is not an image of a known format: use {', '.join(FORMATS)}"
        ) from None
    except RequestError:
        raise
    except _damage() as error:
        raise RequestError("bad_image", f"the image cannot be read: {error}"[:300]) from None


def _damage() -> tuple[type[Exception], ...]:
    """Return the errors that Pillow raises for damaged files."""
    import struct

    from PIL import Image as pillow

    return (
        OSError, SyntaxError, ValueError, TypeError, KeyError, IndexError, OverflowError, EOFError,
        MemoryError, ZeroDivisionError, NotImplementedError, AttributeError, struct.error,
        pillow.DecompressionBombError,
    )  # fmt: skip


def _turn(image: Pillow.Image) -> int:
    """Return the EXIF orientation of an image, 1 if it is upright. TIFF counts as upright, because
    Pillow turns it."""
    if image.format == "TIFF" or "exif" not in image.info:
        return 1
    value = image.getexif().get(_ORIENTATION, 1)
    return value if isinstance(value, int) else 1


def _in_colour(image: Pillow.Image) -> Pillow.Image:
    """Convert an image to RGB on white, in bands of rows, because each conversion takes up to four
    bytes per pixel."""
    from PIL import Image as pillow

    if image.mode in ("I", "F"):
        raise ValueError(f"its values have 32 bits (mode {image.mode}) and are not colours")
    if image.mode == "RGB" and not image.has_transparency_data:
        return image
    coloured = pillow.new("RGB", image.size)
    rows = max(1, _BAND_PIXELS // image.width)
    for top in range(0, image.height, rows):
        band = image.crop((0, top, image.width, min(top + rows, image.height)))
        if image.mode in _SIXTEEN_BITS:
            values = np.asarray(band.convert("I"), np.int32)
            band = pillow.fromarray((values >> 8).astype(np.uint8))
        if band.has_transparency_data:
            paper = pillow.new("RGBA", band.size, (255, 255, 255, 255))
            band = pillow.alpha_composite(paper, band.convert("RGBA"))
        coloured.paste(band.convert("RGB"), (0, top))
    return coloured
