"""The size to which a model resizes an image, which depends on the image's size alone."""

from __future__ import annotations

import json
import math
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from batchgen.engine.interface.outputs import RequestError
from batchgen.engine.vision.vision_config import HALVES, Colours
from batchgen.util.errors import ConfigError
from batchgen.util.fingerprint import fingerprint_text

DEFAULT_TOKENS = 1280
"""The most tokens of an image if `prompt.max_pixels` is not set."""
MOST_RATIO = 200
_MOST_SIDE = 1 << 16
_FILES = ("preprocessor_config.json", "processor_config.json")
_READING = "1"
"""Increased when the same file gives other pixels than in an older version of batchgen."""
_BICUBIC = 3
_EXPECTED: dict[str, Any] = {
    "do_resize": True,
    "do_rescale": True,
    "do_normalize": True,
    "resample": _BICUBIC,
}
"""What the engine does to images; a processor that says otherwise is refused."""


@dataclass(frozen=True, slots=True)
class ImageSizes:
    """The limits of the sizes to which images are resized.

    Attributes:
        side: the pixels of a token's side; heights and widths are multiples of it.
        least: the fewest pixels of an image.
        max_pixels: the most pixels of an image in this job.
        most_of_model: the most pixels of an image that the model's processor allows.
    """

    side: int
    least: int
    max_pixels: int
    most_of_model: int

    def size(self, height: int, width: int) -> tuple[int, int]:
        """The height and width to which an image of this size is resized, as by Qwen's
        `smart_resize`: about the same ratio and within the limits.

        Raises:
            RequestError: bad_image_size: a side is zero, or over 200 times the other one.
        """
        if min(height, width) < 1 or max(height, width) > MOST_RATIO * min(height, width):
            raise RequestError(
                "bad_image_size",
                f"the image has {width}×{height} pixels: each side must have at least 1, and at "
                f"most {MOST_RATIO} times as many as the other: crop the image",
            )
        side, scale = self.side, height * width
        rows, columns = (round(length / side) * side for length in (height, width))
        if rows * columns > self.max_pixels:
            beta = math.sqrt(scale / self.max_pixels)
            rows, columns = (
                max(side, math.floor(length / beta / side) * side) for length in (height, width)
            )
        elif rows * columns < self.least:
            beta = math.sqrt(self.least / scale)
            rows, columns = (math.ceil(length * beta / side) * side for length in (height, width))
        return rows, columns

    def tokens(self, height: int, width: int) -> int:
        """The number of tokens of an image that was resized to this size."""
        return (height // self.side) * (width // self.side)

    def scales_down(self, height: int, width: int) -> bool:
        """Whether `max_pixels` leaves an image of this size fewer pixels than the model allows."""
        return self.max_pixels < self.most_of_model and height * width > self.max_pixels

    def fingerprint(self, pillow: str) -> str:
        """A digest of all that decides the pixels besides the file; `pillow` is the version of
        Pillow."""
        numbers = (self.side, self.least, self.max_pixels)
        return fingerprint_text("images", _READING, pillow, *map(str, numbers))


def image_sizes(
    folder: Path, side: int, max_pixels: int | None, colours: Colours = HALVES
) -> ImageSizes:
    """The limits that the processor in a model's folder has, if a token stands for a square of
    `side`×`side` pixels.

    Raises:
        ConfigError: the folder has no description of its processor, or one of a processor that does
            something else, or `prompt.max_pixels` is less than one token.
    """
    file, processor = _processor(folder)
    model_colours = {"image_mean": [*colours.mean], "image_std": [*colours.std]}
    for key, expected in (_EXPECTED | model_colours).items():
        if (value := processor.get(key, expected)) != expected:
            raise ConfigError(
                f"model.path: {file.name} says {key}={value!r:.60}; supported: {expected!r}"
            )
    parts = (processor.get("patch_size", 0), processor.get("merge_size", 0))
    if processor.get("patch_size") is not None and math.prod(parts) != side:
        raise ConfigError(
            f"model.path: {file.name} says patches of {parts[0]} pixels, {parts[1]} to a token's "
            f"side, and config.json says tokens of {side} pixels: they must agree"
        )
    size = processor.get("size") or {}
    least = size.get("shortest_edge", processor.get("min_pixels", 65536))
    largest = size.get("longest_edge", processor.get("max_pixels", 16777216))
    if (
        not all(type(n) is int and 0 < n <= _MOST_SIDE**2 for n in (least, largest))
        or least > largest
    ):
        raise ConfigError(
            f"model.path: {file.name}: size is {size!r:.100}, and its shortest_edge and "
            f"longest_edge must be numbers from 1 to {_MOST_SIDE**2:,}, the first not the larger"
        )
    if max_pixels is not None and max_pixels < side**2:
        raise ConfigError(
            f"prompt.max_pixels={max_pixels} is less than one token of this model, {side}×{side} "
            f"pixels: give {side**2} or more"
        )
    limit = min(largest, DEFAULT_TOKENS * side**2 if max_pixels is None else max_pixels)
    return ImageSizes(side, min(least, limit), limit, largest)


def has_processor(folder: Path) -> bool:
    """Whether a model's folder describes the model's processor."""
    return any((folder / name).is_file() for name in _FILES)


def _processor(folder: Path) -> tuple[Path, dict[str, Any]]:
    """The file that describes the model's processor, and its keys about images."""
    for name in _FILES:
        file = folder / name
        if not file.is_file():
            continue
        try:
            content = json.loads(file.read_text(encoding="utf-8"))
        except (OSError, ValueError) as error:
            raise ConfigError(f"model.path: {file} cannot be read: {error}") from None
        if isinstance(content, dict):
            values = content.get("image_processor", content)
            if isinstance(values, dict):
                return file, values
        raise ConfigError(
            f"model.path: {file} must describe an image processor as a JSON object: fetch it again"
        )
    raise ConfigError(
        f"model.path: {folder} has no {_FILES[0]}, which says how large images may be"
    )
