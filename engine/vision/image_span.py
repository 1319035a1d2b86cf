"""Where the images of a row are among its tokens, and the rotary positions that follow from this.

`find_spans` locates the images when a request arrives. The scheduler uses `runs_of` to keep tokens
together, and the model's inputs take positions from `rope_positions`.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from batchgen.engine.vision.image import Image


@dataclass(frozen=True, slots=True)
class ImageRules:
    """How a model's prompts represent images: by a run of image tokens, one per square of
    pixels."""

    image_token_id: int
    start_token_id: int  # precedes an image's tokens in a prompt
    end_token_id: int  # follows an image's tokens
    pixels_per_token: int  # the side of a token's square, in pixels
    other_ids: tuple[int, ...] = ()  # the token ids of videos and sound
    # The token that chat templates write for an image instead of the start, image and end tokens.
    # None if they write those.
    mark_id: int | None = None
    margin: str = ""  # text before and after the tokens that replace `mark_id`
    image_side: int | None = None  # the side of every image in pixels; None if sizes vary
    # Whether the rotary positions of an image's tokens have axes: time, row and column.
    has_axes: bool = True
    sees_whole: bool = False  # whether an image's tokens also see later tokens of the same image

    @property
    def never_sampled(self) -> tuple[int, ...]:
        """The token ids that announce an image, ascending. They are never sampled, because no image
        would follow."""
        ids = (self.image_token_id, self.start_token_id, self.end_token_id, *self.other_ids)
        return tuple(sorted(set(ids)))

    def num_tokens(self, height: int, width: int) -> int:
        """Return how many tokens an image of this size in pixels takes."""
        return (height // self.pixels_per_token) * (width // self.pixels_per_token)


class ImageSpan(NamedTuple):
    """The tokens of a row that represent one image. Each token is one square of pixels, in
    row-major order."""

    image: Image
    start: int  # the index of the first token in the row
    rows: int
    columns: int
    has_axes: bool = True  # as in `ImageRules`
    sees_whole: bool = False  # as in `ImageRules`

    @property
    def end(self) -> int:
        """The index after the last token."""
        return self.start + self.rows * self.columns

    @property
    def num_tokens(self) -> int:
        return self.rows * self.columns

    @property
    def skipped_positions(self) -> int:
        """How many fewer positions than tokens the image takes. If positions have axes, the text
        after an image continues at the first position plus the image's longer side; otherwise this
        is 0."""
        if not self.has_axes:
            return 0
        return self.num_tokens - max(self.rows, self.columns)

    def overlaps(self, start: int, end: int) -> bool:
        """Whether any of the row's tokens from `start` to `end` - 1 belongs to the image."""
        return self.start < end and start < self.end


def find_spans(
    token_ids: Sequence[int], images: Sequence[Image], rules: ImageRules
) -> tuple[ImageSpan, ...]:
    """Find the tokens of each image in a prompt.

    Raises ValueError, in words for the user, if the number of image tokens is not what the images
    need, if an image's tokens are not consecutive, or if an image has a size that the model cannot
    take.
    """
    side, required_side = rules.pixels_per_token, rules.image_side
    for number, image in enumerate(images, 1):
        if required_side is not None and (image.height, image.width) != (
            required_side,
            required_side,
        ):
            raise ValueError(
                f"image {number} has {image.height}×{image.width} pixels, and images of this model "
                f"have {required_side}×{required_side}"
            )
        if image.height % side or image.width % side:
            raise ValueError(
                f"image {number} has {image.height}×{image.width} pixels, and its sides must be "
                f"multiples of {side}"
            )
    needed = sum(rules.num_tokens(image.height, image.width) for image in images)
    positions = [i for i, token_id in enumerate(token_ids) if token_id == rules.image_token_id]
    if len(positions) != needed:
        raise ValueError(
            f"the prompt has {len(positions)} image tokens, and its {len(images)} images take "
            f"{needed}"
        )
    spans, used = [], 0
    for number, image in enumerate(images, 1):
        count = rules.num_tokens(image.height, image.width)
        start = positions[used]
        if positions[used + count - 1] != start + count - 1:
            raise ValueError(f"the {count} tokens of image {number} are not consecutive")
        rows, columns = image.height // side, image.width // side
        spans.append(ImageSpan(image, start, rows, columns, rules.has_axes, rules.sees_whole))
        used += count
    return tuple(spans)


class ImageRun(NamedTuple):
    """Tokens of a row, from `start` to `end` - 1, that all see each other. One forward must
    therefore read all of them that no earlier forward has read."""

    start: int
    end: int


def runs_of(spans: Sequence[ImageSpan]) -> tuple[ImageRun, ...]:
    """Return the runs of a row. Adjacent images without a token between them form one run, as in
    transformers."""
    runs: list[ImageRun] = []
    for span in spans:
        if not span.sees_whole:
            continue
        start = runs.pop().start if runs and runs[-1].end == span.start else span.start
        runs.append(ImageRun(start, span.end))
    return tuple(runs)


def last_seen(runs: Sequence[ImageRun], start: int, end: int) -> npt.NDArray[np.int64]:
    """Return, for each of a row's tokens from `start` to `end` - 1, the position of the last token
    that it sees, [end - start]."""
    positions = np.arange(start, end)
    for run in runs:
        positions[max(run.start - start, 0) : max(run.end - start, 0)] = run.end - 1
    return positions


def rope_shift(spans: Sequence[ImageSpan]) -> int:
    """Return the number, at most 0, that is added to the index of a token after all images to get
    its rotary position."""
    return -sum(span.skipped_positions for span in spans)


def rope_positions(spans: Sequence[ImageSpan], start: int, end: int) -> npt.NDArray[np.int64]:
    """Return the rotary positions of a row's tokens from `start` to `end` - 1: [end - start, 3] for
    time, row and column (M-RoPE, Wang et al. 2024).

    The three positions of a text token are equal. All tokens of an image have the same time; their
    row and column count up from it. One token of text, an image of 2 × 2 tokens and one more token
    of text have (0, 0, 0), (1, 1, 1), (1, 1, 2), (1, 2, 1), (1, 2, 2), (3, 3, 3).
    """
    index = np.arange(start, end)
    positions = np.repeat(index[:, None], 3, axis=1)
    shift = 0
    for span in spans:
        first = max(start, span.start)
        # The image's tokens among `start` to `end` - 1; empty if there are none.
        inside = slice(first - start, max(first, min(end, span.end)) - start)
        offset = index[inside] - span.start
        grid = (np.zeros_like(offset), offset // span.columns, offset % span.columns)
        positions[inside] = span.start + shift + np.stack(grid, axis=1)
        shift -= span.skipped_positions
        positions[max(span.end - start, 0) :] = index[max(span.end - start, 0) :, None] + shift
    return positions
