"""Finds texts that are nearly equal to an earlier one, by one-permutation MinHash. The row step
`Dedupe` uses `NearDuplicates`.

The 64-bit hashes of a text's word n-grams are divided into K bins (ranges of equal size), and the
smallest hash of each bin is kept: the text's *signature*, [K]. An empty bin takes the value of
another bin, its *donor*, so that texts of a few words have K values, too. The probability that two
texts agree in a bin is their Jaccard similarity s. The bins form 8 bands of r bins, so two texts
agree in a whole band with probability s^r. Texts that agree in a band are then compared in full.
"""

from __future__ import annotations

import math
from typing import NamedTuple

import numpy as np
import numpy.typing as npt
from xxhash import xxh64_intdigest

from batchgen.inputs.ngrams.kept_rows import HashTable, SpillFile
from batchgen.inputs.ngrams.word_ngrams import Hashes, jaccard, mixed

BANDS = 8
RECALL = 0.95
"""The minimum probability that two texts of the similarity `near` agree in at least one band."""
_MOST_BINS = 128
"""The maximum of K = BANDS · r, which limits the time for a signature."""
_MOST_COMPARED = 64
"""The most texts with which one is compared in full. More can agree only if very many texts have
most of their words in common."""
_DRAWS = 64
"""The number of donors that are tried for an empty bin; if all are empty, the first bin that is not
empty is the donor."""
_EMPTY = np.uint64(2**64 - 1)
"""The smallest hash of a bin behind which there is no hash."""


class Near(NamedTuple):
    """An earlier text: its name, and its similarity."""

    name: str
    similarity: float


def band_rows(near: float) -> int:
    """Return r, the largest number of bins in a band with which the share RECALL of pairs with this
    similarity agrees in a band.

    All bands of a pair differ with probability (1 - near^r)^BANDS, which may be 1 - RECALL.
    """
    limit = _MOST_BINS // BANDS
    if near >= 1:
        return limit
    band_probability = 1 - (1 - RECALL) ** (1 / BANDS)  # the least value of near^r
    return max(1, min(limit, int(math.log(band_probability) / math.log(near))))


class NearDuplicates:
    """The texts kept so far. Each takes about 100 bytes of memory; its n-grams are on disk, 8 bytes
    each.

    Args:
        near: the minimum Jaccard similarity of near duplicates, above 0 and at most 1.
    """

    def __init__(self, near: float) -> None:
        self._near, self._rows = near, band_rows(near)
        bins = BANDS * self._rows
        edges = [(index * 2**64) // bins for index in range(bins)]
        self._bin_starts = np.array(edges, np.uint64)  # [K], the first hash of each bin
        self._bin_stops = np.array([*edges[1:], 2**64 - 1], np.uint64)  # [K], behind the last one
        self._donors = _donors(bins)
        self._table, self._kept = HashTable(), SpillFile()

    @property
    def num_bytes(self) -> int:
        """The memory of the table."""
        return self._table.num_bytes + 8 * len(self._kept)

    def earlier(self, hashes: Hashes, name: str) -> Near | None:
        """Return the first kept text that is similar enough. If there is none, keep this text and
        return None.

        Args:
            hashes: the text's n-grams, sorted and unique. A text without n-grams is similar to
                none.
            name: the text's name.
        """
        if not len(hashes):
            return None
        keys = self.band_keys(hashes)
        candidates = sorted({row for key in keys for row in self._table.find(key)})
        for row in candidates[:_MOST_COMPARED]:
            content = self._kept.read(row)  # number of hashes (4 bytes), hashes, name
            size = 8 * int.from_bytes(content[:4], "little")
            kept_hashes = np.frombuffer(content, np.uint64, count=size // 8, offset=4)
            similarity = jaccard(hashes, kept_hashes)
            if similarity >= self._near:
                return Near(content[4 + size :].decode("utf-8", "surrogatepass"), similarity)
        head = len(hashes).to_bytes(4, "little") + hashes.tobytes()
        row = self._kept.append(head + name.encode("utf-8", "surrogatepass"))
        for key in keys:
            self._table.add(key, row)
        return None

    def band_keys(self, hashes: Hashes) -> list[int]:
        """Return a 64-bit hash for each band of the text's signature."""
        values, size = self.signature(hashes).tobytes(), 8 * self._rows
        bands = (values[band * size : (band + 1) * size] for band in range(BANDS))
        return [xxh64_intdigest(content, band) for band, content in enumerate(bands)]

    def signature(self, hashes: Hashes) -> Hashes:
        """Return the smallest hash of each bin [K]; an empty bin has that of its donor.

        Args:
            hashes: the text's n-grams, sorted and unique; at least one.
        """
        # [K], the index of the first hash that is not below the bin's start.
        first = np.searchsorted(hashes, self._bin_starts)
        inside = first < len(hashes)
        smallest = np.where(inside, hashes[np.minimum(first, len(hashes) - 1)], _EMPTY)
        filled = inside & (smallest < self._bin_stops)
        if filled.all():
            return smallest
        empty = np.flatnonzero(~filled)
        donors = self._donors[empty]  # [empty, draws]
        usable = filled[donors]
        # The first usable donor of each empty bin.
        chosen = np.take_along_axis(donors, usable.argmax(1)[:, None], 1)[:, 0]
        unlucky = ~usable.any(1)
        if unlucky.any():
            chosen[unlucky] = np.flatnonzero(filled)[0]
        smallest[empty] = smallest[chosen]
        return smallest

    def close(self) -> None:
        self._kept.close()


def _donors(bins: int) -> npt.NDArray[np.int64]:
    """Return, for each bin, the other bins from which it takes a value if it is empty, in order [K,
    draws]. They are equal on every machine."""
    indices = np.arange(bins * _DRAWS, dtype=np.uint64) * np.uint64(0x9E3779B97F4A7C15)
    drawn = mixed(mixed(indices + np.uint64(1))) >> np.uint64(32)
    return ((drawn * np.uint64(bins)) >> np.uint64(32)).astype(np.int64).reshape(bins, _DRAWS)
