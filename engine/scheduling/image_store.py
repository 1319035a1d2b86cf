"""The features of images that rows are about to read: which images a step encodes, and how long
their features are kept.

The scheduler asks how far the chunk of a row's prefill may go, given the images in it;
`StepLauncher` encodes the images between two steps and gives their features to the forward.
"""

from __future__ import annotations

from collections.abc import Hashable, Sequence
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
"""After this number of further steps with images the device has long passed a step, whose time is
read."""


@dataclass(slots=True, eq=False)
class _Entry:
    """An image that some rows have tokens of that they have yet to read."""

    num_tokens: int
    pixels: Pixels | None  # until the image is encoded
    features: Tensor | None = None  # [1 + K, num_tokens, hidden_size], from then on
    readers: set[Hashable] = field(default_factory=set)  # the ids of the rows


class ImageStore:
    """Images between the step that encodes them and the last step that reads them.

    An image is encoded as a whole between two steps, before the chunk of a row's prefill that has
    its first token, and dropped when every row that asked for it has read past it or has left. Rows
    with the same image share it meanwhile. Rank 0 decodes images and tells the others their pixels;
    each rank has the whole tower and encodes some of a step's images.

    Args:
        most_tokens: how many tokens the images may have that are encoded in one step.
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
        self.num_images = self.num_tokens = 0  # encoded since the start
        self.seconds = 0.0  # of the device, for images whose times were read
        self._timer = StepTimer(device)

    def begin(self) -> None:
        """Begin to plan a step, in which no image was encoded yet."""
        self._left = self._most

    def chunk_of(self, seq: Row, chunk: int, multiple: int, *, may_wait: bool) -> int:
        """Let the next step encode what the next `chunk` tokens of a row need. Returns how many
        tokens the step can read then: all, or a multiple of `multiple` that ends in no run, which
        is 0 if the row must wait and `may_wait`. Raises RequestError if an image cannot be decoded.
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
        """Let the next step encode the images among a row's tokens from `start` to `end`. Returns
        where the row's chunk must end instead, before the first image that would be too much for
        the step; with `beyond` none is. Raises RequestError if an image cannot be decoded."""
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

    def _load(self, image: Image) -> Pixels:
        """Return an image's pixels, which rank 0 decodes; or raise what it raises."""
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
        """Let go of the images of a row that has read this number of its tokens; None: that
        leaves."""
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
        """Whether the row has the same image again behind what it has read."""
        later = (other for other in seq.spans if num_read is not None and other.end > num_read)
        return any(other.image.digest == span.image.digest for other in later)

    def read_times(self, but_last: int = 0) -> None:
        """Add the times of steps to `seconds`, waiting for those that are still encoded."""
        while len(self._timer) > but_last:
            self.seconds += self._timer.take().seconds

    def encode(self) -> None:
        """Encode the images that the planned step needs."""
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
        loaded = [entry.pixels for entry in group if entry.pixels is not None]
        with self._timer.step("images", len(group)):
            pixels = [upload(image, torch.uint8, self._device) for image in loaded]
            features = self._features(pixels, [entry.num_tokens for entry in group])
        for entry, of_image in zip(group, features, strict=True):
            entry.pixels, entry.features = None, of_image

    def _features(self, pixels: Sequence[Tensor], counts: Sequence[int]) -> Sequence[Tensor]:
        """Compute the features of images with these numbers of tokens, [1 + K, count, hidden_size]
        each. The rank with the fewest tokens so far takes the next image, and tells the others."""
        if self._parallel.size == 1:
            alone: tuple[Tensor, ...] = self._tower(pixels).split(list(counts), dim=1)
            return alone
        loads, positions = [0] * self._parallel.size, []
        for count in counts:
            rank = loads.index(min(loads))
            positions.append((rank, loads[rank]))
            loads[rank] += count
        shape = self._tower.planes, self._tower.config.out_size
        values = shape[0] * shape[1]
        rows = torch.zeros((max(loads), values), dtype=self._tower.dtype, device=self._device)
        of_group = [
            image
            for image, (rank, _) in zip(pixels, positions, strict=True)
            if rank == self._parallel.rank
        ]
        if of_group:
            mine = self._tower(of_group).transpose(0, 1).flatten(1)
            rows[: len(mine)] = mine
        whole = self._parallel.gather(rows)  # [max(loads), ranks · values]
        features = []
        for count, (rank, start) in zip(counts, positions, strict=True):
            part = whole[start : start + count, rank * values : (rank + 1) * values]
            features.append(part.unflatten(1, shape).transpose(0, 1))
        return features

    def features(self, batch: PrefillBatch) -> ImageFeatures | None:
        """Return the image tokens among those that a prefill reads; None if there are none."""
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
