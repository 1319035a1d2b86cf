"""Where the images of a row stand among its tokens, and which rotary positions follow from it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from batchgen.engine.vision.image import Image


@dataclass(frozen=True, slots=True)
class ImageRules:
    """How a model's prompts hold images: a run of image tokens, one for each square of pixels."""

    image_token_id: int
    start_token_id: int  # stands before an image's tokens in a prompt
    end_token_id: int  # and behind them
    pixels_per_token: int  # of a square's side
    other_ids: tuple[int, ...] = ()  # of videos and sound
    # What chat templates write for an image instead of the start, image and end tokens; None: they
    # write these.
    mark_id: int | None = None
    margin: str = ""  # what stands for the mark begins and ends with this text
    image_side: int | None = None  # pixels of each side of all images; None: they have many sizes
    # Whether the rotary positions of an image's tokens have axes: time, row and column.
    has_axes: bool = True
    sees_whole: bool = False  # whether tokens of an image see those behind them of the same image

    @property
    def never_sampled(self) -> tuple[int, ...]:
        """The ids that would say that an image follows, where none does."""
        ids = (self.image_token_id, self.start_token_id, self.end_token_id, *self.other_ids)
        return tuple(sorted(set(ids)))

    def num_tokens(self, height: int, width: int) -> int:
        """Return how many tokens an image of this size in pixels takes."""
        return (height // self.pixels_per_token) * (width // self.pixels_per_token)


class ImageSpan(NamedTuple):
    """The tokens of a row that stand for an image, row by row of squares."""

    image: Image
    start: int  # the index of the first token in the row
    rows: int
    columns: int
    has_axes: bool = True  # as in `ImageRules`, like the next one
    sees_whole: bool = False

    @property
    def end(self) -> int:
        """The index behind the last token."""
        return self.start + self.rows * self.columns

    @property
    def num_tokens(self) -> int:
        return self.rows * self.columns

    @property
    def skipped_positions(self) -> int:
        """How many positions fewer than tokens the image takes: text behind it goes on where the
        longer side ends, if positions have axes."""
        if not self.has_axes:
            return 0
        return self.num_tokens - max(self.rows, self.columns)

    def overlaps(self, start: int, end: int) -> bool:
        """Whether some of the row's tokens from `start` to `end` stand for the image."""
        return self.start < end and start < self.end


def find_spans(
    token_ids: Sequence[int], images: Sequence[Image], rules: ImageRules
) -> tuple[ImageSpan, ...]:
    """Find the tokens of each image in a prompt. Raises ValueError, in words for the user, if the
    prompt has not as many image tokens as its images take, or an image has no whole squares."""
    side, fixed = rules.pixels_per_token, rules.image_side
    for number, image in enumerate(images, 1):
        if fixed is not None and (image.height, image.width) != (fixed, fixed):
            raise ValueError(
                f"image {number} has {image.height}×{image.width} pixels, and images of this model "
                f"have {fixed}×{fixed}"
            )
        if image.height % side or image.width % side:
            raise ValueError(
                f"image {number} has {image.height}×{image.width} pixels, and its sides must be "
                f"multiples of {side}"
            )
    wanted = sum(rules.num_tokens(image.height, image.width) for image in images)
    positions = [i for i, token_id in enumerate(token_ids) if token_id == rules.image_token_id]
    if len(positions) != wanted:
        raise ValueError(
            f"the prompt has {len(positions)} image tokens, and its {len(images)} images take "
            f"{wanted}"
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
    """Tokens of a row that see each other, so that one forward must read all that no earlier one
    has read."""

    start: int
    end: int


def runs_of(spans: Sequence[ImageSpan]) -> tuple[ImageRun, ...]:
    """Return the runs of a row. Images without a token between them are one run, as in
    transformers."""
    runs: list[ImageRun] = []
    for span in spans:
        if not span.sees_whole:
            continue
        start = runs.pop().start if runs and runs[-1].end == span.start else span.start
        runs.append(ImageRun(start, span.end))
    return tuple(runs)


def last_seen(runs: Sequence[ImageRun], start: int, end: int) -> npt.NDArray[np.int64]:
    """Return the position of the last token that each of a row's tokens from `start` to `end` sees,
    [end - start]."""
    positions = np.arange(start, end)
    for run in runs:
        positions[max(run.start - start, 0) : max(run.end - start, 0)] = run.end - 1
    return positions


def rope_shift(spans: Sequence[ImageSpan]) -> int:
    """Return what is added to the index of a token behind all images to get its rotary position, a
    number of at most 0."""
    return -sum(span.skipped_positions for span in spans)


def rope_positions(spans: Sequence[ImageSpan], start: int, end: int) -> npt.NDArray[np.int64]:
    """Return the rotary positions of a row's tokens from `start` to `end`, [end - start, 3]: time,
    row and column. Those of a text token are equal; an image stands at one time, and its rows and
    columns count up from there (M-RoPE, Wang et al. 2024)."""
    index = np.arange(start, end)
    positions = np.repeat(index[:, None], 3, axis=1)
    shift = 0
    for span in spans:
        first = max(start, span.start)
        inside = slice(first - start, max(first, min(end, span.end)) - start)
        offset = index[inside] - span.start
        grid = (np.zeros_like(offset), offset // span.columns, offset % span.columns)
        positions[inside] = span.start + shift + np.stack(grid, axis=1)
        shift -= span.skipped_positions
        positions[max(span.end - start, 0) :] = index[max(span.end - start, 0) :, None] + shift
    return positions
