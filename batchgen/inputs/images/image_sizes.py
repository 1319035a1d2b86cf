"""How large a model wants its images, from the image's own size alone."""

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
"""The most tokens of an image where `prompt.max_pixels` says nothing."""
MOST_RATIO = 200
_MOST_SIDE = 1 << 16
_FILES = ("preprocessor_config.json", "processor_config.json")
_READING = "1"
"""Another number where the same file gives other pixels than in an older version of batchgen."""
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
    """The sizes that images are given.

    Attributes:
        side: pixels of a token's side, of which heights and widths are multiples.
        least: the fewest pixels of an image.
        most: the most pixels of an image, of this job.
        most_of_model: the most pixels of an image, of the model's processor.
    """

    side: int
    least: int
    max_pixels: int
    most_of_model: int

    def size(self, height: int, width: int) -> tuple[int, int]:
        """The height and width that an image of this size gets, as Qwen's `smart_resize` has it.

        Raises:
            RequestError: bad_image_size: a side is zero, or over 200 times the other one.
        """
        if min(height, width) < 1 or max(height, width) > MOST_RATIO * min(height, width):
            raise RequestError(
                "bad_image_size",
                f"the image has {width}×{height} pixels: it must have some, and no side may be "
                f"more than {MOST_RATIO} times the other",
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
        """How many tokens an image of this final size has."""
        return (height // self.side) * (width // self.side)

    def scales_down(self, height: int, width: int) -> bool:
        """Whether an image of this size gets fewer pixels than the model's processor would give."""
        return self.max_pixels < self.most_of_model and height * width > self.max_pixels

    def fingerprint(self, pillow: str) -> str:
        """A digest of all that decides the pixels besides the file; `pillow` is its version."""
        numbers = (self.side, self.least, self.max_pixels)
        return fingerprint_text("images", _READING, pillow, *map(str, numbers))


def image_sizes(
    folder: Path, side: int, max_pixels: int | None, colours: Colours = HALVES
) -> ImageSizes:
    """The rules of a model's folder, whose tokens stand for squares of `side` pixels.

    Raises:
        ConfigError: the folder has no description of its processor, or one of a processor that does
            something else, or `prompt.max_pixels` is less than one token.
    """
    file, found = _processor(folder)
    own_colours = {"image_mean": [*colours.mean], "image_std": [*colours.std]}
    for key, expected in (_EXPECTED | own_colours).items():
        if (value := found.get(key, expected)) != expected:
            raise ConfigError(
                f"model.path: {file.name} says {key}={value!r:.60}; supported is {expected!r}"
            )
    parts = (found.get("patch_size", 0), found.get("merge_size", 0))
    if found.get("patch_size") is not None and math.prod(parts) != side:
        raise ConfigError(
            f"model.path: {file.name} says patches of {parts[0]} pixels, {parts[1]} to a token's "
            f"side, and config.json says tokens of {side} pixels: they must agree"
        )
    size = found.get("size") or {}
    least = size.get("shortest_edge", found.get("min_pixels", 65536))
    most = size.get("longest_edge", found.get("max_pixels", 16777216))
    if not all(type(n) is int and 0 < n <= _MOST_SIDE**2 for n in (least, most)) or least > most:
        raise ConfigError(f"model.path: {file.name}: size {size!r:.100} is not usable")
    if max_pixels is not None and max_pixels < side**2:
        raise ConfigError(
            f"prompt.max_pixels={max_pixels} is less than one token of this model, {side}×{side} "
            f"pixels: give {side**2} or more"
        )
    own = min(most, DEFAULT_TOKENS * side**2 if max_pixels is None else max_pixels)
    return ImageSizes(side, min(least, own), own, most)


def has_processor(folder: Path) -> bool:
    """Whether a model's folder describes the model's processor."""
    return any((folder / name).is_file() for name in _FILES)


def _processor(folder: Path) -> tuple[Path, dict[str, Any]]:
    """The file that describes the model's processor, and what it says of images."""
    for name in _FILES:
        file = folder / name
        if not file.is_file():
            continue
        try:
            found = json.loads(file.read_text(encoding="utf-8"))
        except (OSError, ValueError) as error:
            raise ConfigError(f"model.path: {file} cannot be read: {error}") from None
        if isinstance(found, dict):
            own = found.get("image_processor", found)
            if isinstance(own, dict):
                return file, own
        raise ConfigError(f"model.path: {file} is no description of a processor")
    raise ConfigError(
        f"model.path: {folder} has no {_FILES[0]}, which says how large images may be"
    )
