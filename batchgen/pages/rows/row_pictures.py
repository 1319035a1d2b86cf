"""Prepares the images of a row for pages, from the thumbnails in the job's folder."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

_SHOWN_DIGITS = 12
"""The number of digits of a digest in a text."""
_MOST_NAME = 300
"""The maximum number of characters of an image's name in a text."""


@dataclass(frozen=True, slots=True)
class ShownImage:
    """An image in a page.

    Attributes:
        text: the image's name, size and digest.
        jpeg: a thumbnail, a JPEG in base64; None if there is none.
    """

    text: str
    jpeg: str | None


def image_text(image: Mapping[str, Any]) -> str:
    """Return a text with an image's name, its size, and the beginning of its digest."""
    name, digest = image.get("path"), str(image.get("digest"))[:_SHOWN_DIGITS]
    size = f"{image.get('width')}×{image.get('height')}, {image.get('tokens')} tokens"
    return f"{str(name)[:_MOST_NAME]}: {size}, {digest}" if name else f"{size}, {digest}"


def shown_images(
    images: Sequence[Mapping[str, Any]] | None, thumbnails: Mapping[str, str]
) -> list[ShownImage]:
    """Return the images of a row for a page.

    Args:
        thumbnails: JPEGs in base64, by the images' digests.
    """
    return [
        ShownImage(image_text(each), thumbnails.get(str(each.get("digest"))))
        for each in images or ()
        if isinstance(each, Mapping)
    ]
