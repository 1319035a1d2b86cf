"""Finds the images of a row, which are inside the row or in files of one folder. `sources_of`
recognises them in a value of the row, and `ImageFolder` reads files.

`"cats/1.png"` → `ImageSource(data=None, path="cats/1.png")`;
`"data:image/png;base64,iVBORw=="` → `ImageSource(data=b"\x89PNG", path=None)`.
"""

from __future__ import annotations

import base64
import binascii
import io
import os
import re
import stat
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any
from urllib.parse import unquote, urlsplit

from batchgen.engine.interface.outputs import RequestError

if TYPE_CHECKING:
    from PIL import Image as Pillow

MOST_BYTES = 256 << 20
"""The most bytes of a file; a larger one is an error of its row."""
_SCHEME = re.compile(r"([A-Za-z][A-Za-z0-9+.-]*):(//)?")
"""The scheme of a URL, and the slashes after it."""
_NOT_IN_PNG = ("CMYK", "YCbCr", "LAB", "HSV", "RGBa", "La", "RGBX", "PA")
"""Modes of Pillow that a PNG file cannot hold."""
_DATA = re.compile(r"data:([\w/+.-]*)(?:;[\w=-]+)*;base64,", re.IGNORECASE)
"""The beginning of a base64 data: URL."""


@dataclass(frozen=True, slots=True)
class ImageSource:
    """An image in a row: its bytes, or the path of its file as the row names it. If there are
    bytes, the path is only a name."""

    data: bytes | None
    path: str | None


def sources_of(value: Any) -> list[ImageSource]:
    """Return the images in a value: null means none, and a list means several.

    A value is bytes, a text, an image of Pillow, or a mapping with `bytes` and `path` as datasets
    has it. A text is a data: URL, a file: URL or a path.

    Raises:
        RequestError: the value is not an image (`bad_image`), or is an address on the network
            (`image_url`).
    """
    if value is None:
        return []
    if isinstance(value, list | tuple):
        return [source for item in value for source in sources_of(item)]
    if isinstance(value, bytes | bytearray | memoryview):
        return [ImageSource(bytes(value), None)]
    if isinstance(value, str | os.PathLike):
        return [_of_text(str(value))]
    if isinstance(value, Mapping) and {"bytes", "path"} & set(value):
        data, path = value.get("bytes"), value.get("path")
        if isinstance(data, bytes):
            return [ImageSource(data, path if isinstance(path, str) else None)]
        if isinstance(path, str):
            return [_of_text(path)]
        if data is None and path is None:
            return []
    pillow = sys.modules.get("PIL.Image")
    if pillow is not None and isinstance(value, pillow.Image):
        return [ImageSource(_png(value), None)]
    raise RequestError(
        "bad_image",
        f"an image is bytes, a path, a data: URL or {{bytes, path}}, got {_kind(value)}",
    )


def _png(image: Pillow.Image) -> bytes:
    """The pixels of an image of Pillow as a file that loses none of them."""
    file = io.BytesIO()
    try:
        (image.convert("RGB") if image.mode in _NOT_IN_PNG else image).save(
            file, "PNG", compress_level=1
        )
    except (OSError, ValueError) as error:
        raise RequestError("bad_image", f"the image cannot be read: {error}"[:300]) from None
    return file.getvalue()


def _of_text(text: str) -> ImageSource:
    """Recognise a data: URL, a file: URL or a path. Raises RequestError for other URLs."""
    if (match := _DATA.match(text)) is not None:
        try:
            return ImageSource(base64.b64decode(text[match.end() :], validate=True), None)
        except (binascii.Error, ValueError):
            raise RequestError("bad_image", "the data: URL is not in base64") from None
    scheme = _SCHEME.match(text)
    if scheme is not None and scheme[1].lower() == "file":
        parts = urlsplit(text)
        if parts.netloc not in ("", "localhost"):
            raise RequestError("image_url", f"{_short(text)}: the file is on another machine")
        return ImageSource(None, unquote(parts.path))
    # A colon without slashes, as in "C:cat.png", may be part of a path.
    if scheme is not None and (scheme[2] or scheme[1].lower() == "data"):
        raise RequestError(
            "image_url",
            f"{_short(text)}: images are not fetched: download them first and name their paths, "
            "or give their bytes as data:…;base64,…",
        )
    if not text or "\0" in text:
        raise RequestError(
            "image_not_found", "the path of the image is empty or has a null character"
        )
    return ImageSource(None, text)


@dataclass(frozen=True, slots=True)
class ImageFolder:
    """The folder whose files rows may name.

    Attributes:
        root: the folder; None allows no files.
        anywhere: whether paths may lead out of the folder, for paths from a program instead of a
            data set.
    """

    root: Path | None
    anywhere: bool = False

    def find(self, name: str) -> Path:
        """Return the file that a row names, with links resolved.

        Raises:
            RequestError: it is outside the folder (`image_not_allowed`), does not exist
                (`image_not_found`), or is too large (`bad_image`).
        """
        if self.root is None:
            raise RequestError(
                "image_not_allowed",
                f"{_short(name)}: this data set has no folder below which rows may name files: set "
                "prompt.image_root to the folder that has them",
            )
        root = os.path.realpath(self.root)
        try:
            real = os.path.realpath(os.path.join(root, name))
            inside = self.anywhere or os.path.commonpath([root, real]) == root
            status = os.stat(real) if inside else None
        except (OSError, ValueError):
            raise RequestError(
                "image_not_found",
                f"{_short(name)}: there is no such file below the folder of images",
            ) from None
        if status is None:
            raise RequestError(
                "image_not_allowed",
                f"{_short(name)} is outside the folder of images: rows may name files below that "
                "of the data set only, or below prompt.image_root",
            )
        if not stat.S_ISREG(status.st_mode):
            raise RequestError("image_not_found", f"{_short(name)} is not a file")
        if status.st_size > MOST_BYTES:
            raise RequestError("bad_image", f"{_short(name)} has more than {MOST_BYTES:,} bytes")
        return Path(real)

    def read(self, name: str) -> bytes:
        """The bytes of the file that a row names. RequestError: see `find`."""
        path = self.find(name)
        try:
            return path.read_bytes()
        except OSError as error:
            raise RequestError(
                "image_not_found", f"{_short(name)} cannot be read: {error.strerror}"
            ) from None


def _short(text: str) -> str:
    return text if len(text) <= 200 else f"{text[:200]}…"


def _kind(value: Any) -> str:
    return f"{type(value).__name__} {_short(repr(value))}"
