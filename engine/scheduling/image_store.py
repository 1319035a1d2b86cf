"""Keeps the features of images: decides which images a step encodes, and how long their features
are kept.

The *features* of an image are what the vision tower computes from it: vectors that replace the
embeddings of its tokens. An *image run* is a range of tokens of one image, or of adjacent ones,
that attend to each other, so that one forward must read it whole.

The scheduler asks `chunk_of` how far a row's prefill chunk may go, given its images. `StepLauncher`
calls `encode` between two steps and passes `features` to the forward.
"""

from __future__ import annotations

from collections.abc import Hashable, Iterable, Sequence
from dataclasses import dataclass, field

import numpy as np
import torch
from torch import Tensor

from batchgen.engine.caches.forward_context import ImageFeatures
from batchgen.engine.device.step_timing import StepTimer
from batchgen.engine.device.transfer import upload
from batchgen.engine.interface.outputs import RequestError
from batchgen.engine.parallel.tensor_parallel import ALONE, TensorParallel
from batchgen.engine.rows.scheduled_batch import PrefillBatch
from batchgen.engine.rows.sequence import Sequence as Row
from batchgen.engine.vision.image import Image, Pixels
from batchgen.engine.vision.image_span import ImageSpan
from batchgen.engine.vision.vision_tower import VisionTower

_STEPS_BEHIND = 8
"""The times of encoding are read after this many further steps with images, when the device is
certainly done."""


@dataclass(slots=True, eq=False)
class _Entry:
    """An image with tokens that some row has yet to read."""

    num_tokens: int
    pixels: Pixels | None  # until the image is encoded
    # [1 + K, num_tokens, hidden_size], from then on: what replaces the tokens' embeddings, and what
    # is added to the residual stream after each of the first K layers.
    features: Tensor | None = None
    readers: set[Hashable] = field(default_factory=set)  # the ids of the rows


class ImageStore:
    """Keeps each image from the step that encodes it to the last step that reads it.

    An image is encoded as a whole, between two steps, before the prefill chunk that contains its
    first token; with it are encoded images of rows that wait. It is dropped when every row that
    uses it has read past it or has left; rows with the same image share it until then.

    With several ranks, rank 0 decodes the image files and sends the pixels to the others. Each rank
    has the whole vision tower and encodes some of a step's images.

    Args:
        most_tokens: the most image tokens that are encoded in one step.
    """

    def __init__(
        self,
        tower: VisionTower,
        most_tokens: int,
        device: torch.device,
        parallel: TensorParallel = ALONE,
    ) -> None:
        self._tower, self._most, self._device = tower, most_tokens, device
        self._parallel = parallel
        self._left = most_tokens
        self._entries: dict[bytes, _Entry] = {}
        self.num_images = self.num_tokens = 0  # images encoded since the start, and their tokens
        self.seconds = 0.0  # the device's time for the images whose times were read
        self._timer = StepTimer(device)

    def begin(self) -> None:
        """Start to plan a step."""
        self._left = self._most

    def chunk_of(self, seq: Row, chunk: int, multiple: int, *, may_wait: bool) -> int:
        """Schedule the images among the row's next `chunk` tokens for encoding in the next step, as
        far as they fit.

        Args:
            multiple: a chunk that is cut has a multiple of this many tokens.
            may_wait: whether the row may wait for a later step.

        Returns:
            How many tokens the step can read: `chunk`, or fewer, ending outside any image run. It
                is 0 if the row must wait, which only `may_wait` allows.

        Raises:
            RequestError: an image cannot be decoded.
        """
        start = seq.num_computed_tokens
        fitting = self.reach(seq, start, start + chunk) - start
        if fitting == chunk:
            return chunk
        fitting = seq.last_border(start + fitting // multiple * multiple) - start
        if fitting <= 0 and may_wait:
            return 0
        if fitting <= 0:
            fitting = min(chunk, max(multiple, seq.end_of_run(start) - start))
            self.reach(seq, start, start + fitting, beyond=True)
        return fitting

    def reach(self, seq: Row, start: int, end: int, *, beyond: bool = False) -> int:
        """Schedule the images among a row's tokens from `start` to `end` for encoding in the next
        step. With `beyond`, images are scheduled even if they exceed the step's limit.

        Returns:
            The position where the row's chunk must end: `end`, or the start of the first image that
                exceeds the limit.

        Raises:
            RequestError: an image cannot be decoded.
        """
        for span in seq.spans:
            if not span.overlaps(start, end):
                continue
            digest = span.image.digest
            if digest not in self._entries:
                if span.num_tokens > self._left and not beyond:
                    return max(start, span.start)
                self._entries[digest] = _Entry(span.num_tokens, self._load(span.image))
                self._left -= span.num_tokens
            self._entries[digest].readers.add(seq.request_id)
        return end

    def look_ahead(self, rows: Iterable[Row]) -> None:
        """Schedule the images of rows that wait, in their order, for the next step too, if it
        encodes images anyway. The launches of a step take the host as long for one image as for
        many.

        All images kept then have at most as many tokens as a step may encode.
        """
        if all(entry.pixels is None for entry in self._entries.values()):
            return
        room = self._most - sum(entry.num_tokens for entry in self._entries.values())
        for seq in rows:
            for span in seq.spans:
                digest = span.image.digest
                if digest not in self._entries:
                    if span.num_tokens > room:
                        return
                    try:
                        pixels = self._load(span.image)
                    except RequestError:  # raised again when the row starts
                        break
                    self._entries[digest] = _Entry(span.num_tokens, pixels)
                    room -= span.num_tokens
                self._entries[digest].readers.add(seq.request_id)

    def _load(self, image: Image) -> Pixels:
        """Return an image's pixels, which rank 0 decodes for all ranks. Raises RequestError if it
        cannot be decoded."""
        pixels: Pixels | tuple[str, str] | None = None
        if self._parallel.rank == 0:
            try:
                pixels = image.load()
            except RequestError as error:
                if self._parallel.size == 1:
                    raise
                pixels = error.type, str(error)
        pixels = self._parallel.agree(pixels)
        if isinstance(pixels, tuple):
            raise RequestError(*pixels)
        assert pixels is not None
        return pixels

    def drop(self, seq: Row, num_read: int | None = None) -> None:
        """Release the images that a row has read past.

        Args:
            num_read: the number of tokens that the row has read; None if the row leaves the engine.
        """
        for span in seq.spans:
            if num_read is not None and span.end > num_read:
                continue
            entry = self._entries.get(span.image.digest)
            if entry is None or self._is_needed(seq, span, num_read):
                continue
            entry.readers.discard(seq.request_id)
            if not entry.readers:
                del self._entries[span.image.digest]

    @staticmethod
    def _is_needed(seq: Row, span: ImageSpan, num_read: int | None) -> bool:
        """Return whether the row has the same image again after its first `num_read` tokens."""
        later = (other for other in seq.spans if num_read is not None and other.end > num_read)
        return any(other.image.digest == span.image.digest for other in later)

    def read_times(self, but_last: int = 0) -> None:
        """Add the device's times of all but the newest `but_last` encodings to `seconds`. Waits for
        encodings that still run."""
        while len(self._timer) > but_last:
            self.seconds += self._timer.take().seconds

    def encode(self) -> None:
        """Encode the images that the planned step needs, in groups within the token limit."""
        waiting = [entry for entry in self._entries.values() if entry.pixels is not None]
        group: list[_Entry] = []
        for entry in waiting:
            if group and sum(e.num_tokens for e in group) + entry.num_tokens > self._most:
                self._encode(group)
                group = []
            group.append(entry)
        if group:
            self._encode(group)
        self.num_images += len(waiting)
        self.num_tokens += sum(entry.num_tokens for entry in waiting)
        self.read_times(_STEPS_BEHIND)

    def _encode(self, group: Sequence[_Entry]) -> None:
        """Encode the images of these entries together, and replace their pixels by features."""
        host_pixels = [entry.pixels for entry in group if entry.pixels is not None]
        with self._timer.step("images", len(group)):
            pixels = [upload(image, torch.uint8, self._device) for image in host_pixels]
            features = self._features(pixels, [entry.num_tokens for entry in group])
        for entry, image_features in zip(group, features, strict=True):
            entry.pixels, entry.features = None, image_features

    def _features(self, pixels: Sequence[Tensor], counts: Sequence[int]) -> Sequence[Tensor]:
        """Compute the features of images.

        With several ranks, each image is encoded by the rank with the fewest tokens so far, and all
        ranks gather the results.

        Args:
            counts: the number of tokens of each image.

        Returns:
            The features of each image, [1 + K, count, hidden_size].
        """
        if self._parallel.size == 1:
            unshared: tuple[Tensor, ...] = self._tower(pixels).split(list(counts), dim=1)
            return unshared
        # The number of tokens of each rank, and for each image its rank and its first row there.
        loads, positions = [0] * self._parallel.size, []
        for count in counts:
            rank = loads.index(min(loads))
            positions.append((rank, loads[rank]))
            loads[rank] += count
        # A rank's features are gathered as rows [tokens, (1 + K) · hidden_size].
        shape = self._tower.planes, self._tower.config.out_size
        values = shape[0] * shape[1]
        rows = torch.zeros((max(loads), values), dtype=self._tower.dtype, device=self._device)
        rank_pixels = [
            image
            for image, (rank, _) in zip(pixels, positions, strict=True)
            if rank == self._parallel.rank
        ]
        if rank_pixels:
            rank_features = self._tower(rank_pixels).transpose(0, 1).flatten(1)
            rows[: len(rank_features)] = rank_features
        gathered = self._parallel.gather(rows)  # [max(loads), ranks · values]
        features = []
        for count, (rank, start) in zip(counts, positions, strict=True):
            part = gathered[start : start + count, rank * values : (rank + 1) * values]
            features.append(part.unflatten(1, shape).transpose(0, 1))
        return features

    def features(self, batch: PrefillBatch) -> ImageFeatures | None:
        """Return the features of the image tokens that a prefill reads; None if it reads none."""
        indices: list[np.ndarray[tuple[int], np.dtype[np.int64]]] = []
        values: list[Tensor] = []
        begin = 0
        for seq, start, length in zip(batch.seqs, batch.starts, batch.lengths, strict=True):
            for span in seq.spans:
                if not span.overlaps(start, start + length):
                    continue
                first, last = max(start, span.start), min(start + length, span.end)
                features = self._entries[span.image.digest].features
                assert features is not None and features.shape[1] == span.num_tokens
                values.append(features[:, first - span.start : last - span.start])
                indices.append(np.arange(first, last) + (begin - start))
            begin += length
        if not indices:
            return None
        index = upload(np.concatenate(indices), torch.int64, self._device)
        return ImageFeatures(index, torch.cat(values, dim=1))

    def __len__(self) -> int:
        return len(self._entries)
