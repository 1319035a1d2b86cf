"""Computes the size to which a model resizes an image, from the image's size alone.

`image_sizes` reads the limits from the model's processor configuration (preprocessor_config.json)
and returns an `ImageSizes`, which `RowImages` uses. A model cuts a resized image into squares and
makes one token of each. With squares of 32 pixels, an image of 1000×700 pixels becomes 992×704
pixels and takes 31 × 22 = 682 tokens.
"""

from __future__ import annotations

import json
import math
from abc import ABC, abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from batchgen.engine.interface.outputs import RequestError
from batchgen.engine.vision.vision_config import AxialConfig, SquareConfig, VisionConfig
from batchgen.inputs.images.decode_image import Resampling
from batchgen.util.errors import ConfigError
from batchgen.util.fingerprint import fingerprint_text

DEFAULT_TOKENS = 1280
"""The most tokens of an image if `prompt.max_pixels` is not set."""
MOST_RATIO = 200
"""How many times longer than the other one a side may be, as in Qwen's processor."""
_MOST_SIDE = 1 << 16
"""Pixels; limits of the area in a model's files may be up to its square."""
_FILES = ("preprocessor_config.json", "processor_config.json")
_READING = "1"
"""Increased when a new version of batchgen makes different pixels from the same file."""
_BILINEAR, _BICUBIC = 2, 3  # Pillow's numbers, which `resample` in processor files has
_BUDGETS = (70, 140, 280, 560, 1120)
"""The values of max_soft_tokens (the most tokens of an image) that Gemma 4's processor allows."""
_EXPECTED: dict[str, Any] = {
    "do_resize": True,
    "do_rescale": True,
    "do_normalize": True,
    "resample": _BICUBIC,
}
"""The processing that the engine does; a processor with other values is refused."""


@dataclass(frozen=True, slots=True)
class ImageSizes(ABC):
    """The rule by which a model resizes images.

    Attributes:
        side: the side of a token's square in pixels; heights and widths are multiples of it.
        max_pixels: the maximum number of pixels of an image in this job.
        most_of_model: the maximum number of pixels that the model's processor allows.
    """

    side: int
    max_pixels: int
    most_of_model: int

    @abstractmethod
    def size(self, height: int, width: int) -> tuple[int, int]:
        """Return the height and width to which an image is resized, from its own.

        Raises:
            RequestError: the model cannot read an image of this size (`bad_image_size`).
        """

    @property
    @abstractmethod
    def numbers(self) -> tuple[object, ...]:
        """All values that decide resized sizes, for the fingerprint."""

    @property
    def resampling(self) -> Resampling:
        """How images are scaled, as Pillow names it."""
        return "BICUBIC"

    def tokens(self, height: int, width: int) -> int:
        """Return the number of tokens of an image with this resized size."""
        return (height // self.side) * (width // self.side)

    def scales_down(self, height: int, width: int) -> bool:
        """Whether `max_pixels` leaves an image of this size fewer pixels than the model allows."""
        return self.max_pixels < self.most_of_model and height * width > self.max_pixels

    def fingerprint(self, pillow: str) -> str:
        """Return a digest of everything besides the file that decides the pixels, including the
        version of Pillow."""
        return fingerprint_text("images", _READING, pillow, *map(str, self.numbers))


@dataclass(frozen=True, slots=True)
class AreaSizes(ImageSizes):
    """Sizes of about the same ratio and within limits of the area, as by Qwen's `smart_resize`.

    Attributes:
        min_pixels: the fewest pixels of an image.
    """

    min_pixels: int

    def size(self, height: int, width: int) -> tuple[int, int]:
        """See `ImageSizes.size`: no side may be zero, or over 200 times the other one."""
        if min(height, width) < 1 or max(height, width) > MOST_RATIO * min(height, width):
            raise RequestError(
                "bad_image_size",
                f"the image has {width}×{height} pixels: each side must have at least 1, and at "
                f"most {MOST_RATIO} times as many as the other: crop the image",
            )
        side, area = self.side, height * width
        rows, columns = (round(length / side) * side for length in (height, width))
        if rows * columns > self.max_pixels:
            beta = math.sqrt(area / self.max_pixels)
            rows, columns = (
                max(side, math.floor(length / beta / side) * side) for length in (height, width)
            )
        elif rows * columns < self.min_pixels:
            beta = math.sqrt(self.min_pixels / area)
            rows, columns = (math.ceil(length * beta / side) * side for length in (height, width))
        return rows, columns

    @property
    def numbers(self) -> tuple[object, ...]:
        return self.side, self.min_pixels, self.max_pixels


@dataclass(frozen=True, slots=True)
class BudgetSizes(ImageSizes):
    """The largest sizes of about the same ratio within `max_pixels` (Gemma 4). Small images are
    scaled up to them. An image so long that less than one row or column of tokens would be left
    gets one."""

    def size(self, height: int, width: int) -> tuple[int, int]:
        """See `ImageSizes.size`: no side may be zero."""
        _refuse_empty(height, width)
        side, factor = self.side, math.sqrt(self.max_pixels / (height * width))
        rows, columns = (math.floor(factor * length / side) for length in (height, width))
        longest = self.max_pixels // side**2  # the most tokens in one row or column
        if not rows:
            rows, columns = 1, min(width // height, longest)
        elif not columns:
            rows, columns = min(height // width, longest), 1
        return rows * side, columns * side

    @property
    def numbers(self) -> tuple[object, ...]:
        return "budget", self.side, self.max_pixels


@dataclass(frozen=True, slots=True)
class FixedSizes(ImageSizes):
    """One size for all images, which are stretched to it (Gemma 3)."""

    def size(self, height: int, width: int) -> tuple[int, int]:
        """See `ImageSizes.size`: no side may be zero."""
        _refuse_empty(height, width)
        side = math.isqrt(self.max_pixels)
        return side, side

    @property
    def numbers(self) -> tuple[object, ...]:
        return "fixed", self.side, self.max_pixels

    @property
    def resampling(self) -> Resampling:
        return "BILINEAR"


def _refuse_empty(height: int, width: int) -> None:
    if min(height, width) < 1:
        raise RequestError(
            "bad_image_size",
            f"the image has {width}×{height} pixels: each side must have at least 1",
        )


def image_sizes(folder: Path, vision: VisionConfig, max_pixels: int | None) -> ImageSizes:
    """Return the rule of resizing that the processor in a model's folder describes.

    Args:
        max_pixels: the configured `prompt.max_pixels`; None if it is not set.

    Raises:
        ConfigError: the folder has no description of its processor, or one of a processor that does
            something else, or `prompt.max_pixels` is not possible.
    """
    file, processor = _processor(folder)
    if isinstance(vision, AxialConfig):
        return _budget_sizes(file, processor, vision, max_pixels)
    if isinstance(vision, SquareConfig):
        return _fixed_sizes(file, processor, vision, max_pixels)
    return _area_sizes(file, processor, vision, max_pixels)


def _area_sizes(
    file: Path, processor: dict[str, Any], vision: VisionConfig, max_pixels: int | None
) -> AreaSizes:
    """Read the limits of Qwen's processor."""
    side = vision.rules.pixels_per_token
    _check(file, processor, _EXPECTED | _colours(vision))
    _check_patches(file, processor, "merge_size", vision)
    size = processor.get("size") or {}
    smallest = size.get("shortest_edge", processor.get("min_pixels", 65536))
    largest = size.get("longest_edge", processor.get("max_pixels", 16777216))
    if (
        not all(type(n) is int and 0 < n <= _MOST_SIDE**2 for n in (smallest, largest))
        or smallest > largest
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
    return AreaSizes(side, max_pixels=limit, most_of_model=largest, min_pixels=min(smallest, limit))


def _budget_sizes(
    file: Path, processor: dict[str, Any], vision: AxialConfig, max_pixels: int | None
) -> BudgetSizes:
    """Read the budget of Gemma 4's processor. `max_pixels` chooses among those that the model was
    trained for."""
    _check(file, processor, _EXPECTED | {"do_normalize": False})
    _check_patches(file, processor, "pooling_kernel_size", vision)
    area, budget = vision.rules.pixels_per_token**2, processor.get("max_soft_tokens", 280)
    if budget not in _BUDGETS:
        raise ConfigError(
            f"model.path: {file.name} says max_soft_tokens={budget!r:.60}; supported are "
            f"{', '.join(map(str, _BUDGETS))}"
        )
    if max_pixels is not None:
        fitting = [tokens for tokens in _BUDGETS if tokens * area <= max_pixels]
        if not fitting:
            raise ConfigError(
                f"prompt.max_pixels={max_pixels} is less than the smallest budget of this model, "
                f"{_BUDGETS[0]} tokens: give {_BUDGETS[0] * area} or more"
            )
        budget = fitting[-1]
    # In the worst case all tokens are in one row, which has merge_size patches for each, and each
    # patch needs its own row in the table of position embeddings.
    if budget * vision.merge_size > vision.table_size:
        raise ConfigError(
            f"model.path: config.json says position_embedding_size={vision.table_size}, and an "
            f"image of {budget} tokens may have {budget * vision.merge_size} patches in a row"
        )
    return BudgetSizes(
        vision.rules.pixels_per_token, max_pixels=budget * area, most_of_model=budget * area
    )


def _fixed_sizes(
    file: Path, processor: dict[str, Any], vision: SquareConfig, max_pixels: int | None
) -> FixedSizes:
    """Check Gemma 3's processor, which has no choice."""
    side = vision.grid_side * vision.patch_size
    size = {"height": side, "width": side}
    expected = _EXPECTED | _colours(vision) | {"resample": _BILINEAR, "size": size}
    _check(file, processor, expected)
    if processor.get("do_pan_and_scan"):
        raise ConfigError(
            f"model.path: {file.name} says do_pan_and_scan=true, which would add crops of images "
            "to prompts and is not supported: set it to false"
        )
    if max_pixels is not None:
        raise ConfigError(
            f"prompt.max_pixels: all images have {side}×{side} pixels in this model: leave it out"
        )
    return FixedSizes(vision.rules.pixels_per_token, max_pixels=side**2, most_of_model=side**2)


def _colours(vision: VisionConfig) -> dict[str, Any]:
    """The processor's keys for what the model subtracts from colours and divides them by."""
    return {"image_mean": [*vision.colours.mean], "image_std": [*vision.colours.std]}


def _check(file: Path, processor: Mapping[str, Any], expected: Mapping[str, Any]) -> None:
    """Refuse a processor that has other values for these keys."""
    for key, value in expected.items():
        if (actual := processor.get(key, value)) != value:
            raise ConfigError(
                f"model.path: {file.name} says {key}={actual!r:.60}; supported: {value!r}"
            )


def _check_patches(
    file: Path, processor: Mapping[str, Any], merge_key: str, vision: VisionConfig
) -> None:
    """Refuse a processor whose tokens are of another size than the model's."""
    side = vision.rules.pixels_per_token
    patch, merge = processor.get("patch_size"), processor.get(merge_key, 0)
    if patch is not None and patch * merge != side:
        raise ConfigError(
            f"model.path: {file.name} says patches of {patch} pixels, {merge} to a token's "
            f"side, and config.json says tokens of {side} pixels: they must agree"
        )


def has_processor(folder: Path) -> bool:
    """Whether a model's folder describes the model's processor."""
    return any((folder / name).is_file() for name in _FILES)


def _processor(folder: Path) -> tuple[Path, dict[str, Any]]:
    """Return the file that describes the model's processor, and its keys about images."""
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
