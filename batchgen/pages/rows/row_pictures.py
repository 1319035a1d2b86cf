"""Prepares the images of a row for pages, from the thumbnails in the job's folder."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

_SHOWN_DIGITS = 12
_MOST_NAME = 300


@dataclass(frozen=True, slots=True)
class ShownImage:
    """An image in a page: what is known of it, and base64 of a small JPEG of it, if any."""

    text: str
    jpeg: str | None


def image_text(image: Mapping[str, Any]) -> str:
    """What an image is called, its size, and the beginning of its digest."""
    name, digest = image.get("path"), str(image.get("digest"))[:_SHOWN_DIGITS]
    size = f"{image.get('width')}×{image.get('height')}, {image.get('tokens')} tokens"
    return f"{str(name)[:_MOST_NAME]}: {size}, {digest}" if name else f"{size}, {digest}"


def shown_images(
    images: Sequence[Mapping[str, Any]] | None, thumbnails: Mapping[str, str]
) -> list[ShownImage]:
    """The images of a row as pages show them."""
    return [
        ShownImage(image_text(each), thumbnails.get(str(each.get("digest"))))
        for each in images or ()
        if isinstance(each, Mapping)
    ]
