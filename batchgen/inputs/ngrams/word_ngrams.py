"""Word n-grams of texts as 64-bit hashes, to find what texts have in common. The row steps `Dedupe`
and `Against` use this.

With n = 2, "The cat sat." has two n-grams: (the, cat) and (cat, sat).
"""

from __future__ import annotations

import re
import unicodedata

import numpy as np
import numpy.typing as npt
from xxhash import xxh64_intdigest

Hashes = npt.NDArray[np.uint64]
"""[N], the hashes of N words or n-grams."""

_WORDS = re.compile(r"[\u3040-\u30ff\u3400-\u9fff\uf900-\ufaff]|[^\W\u3040-\u30ff\u3400-\u9fff]+")
"""A word is a run of letters, digits and `_`; each sign of Chinese and Japanese is one of its own,
because these are written without spaces."""
_ASCII_WORDS = re.compile(rb"\w+")
_ODD = np.uint64(0x9E3779B97F4A7C15)
_MIX = np.uint64(0xBF58476D1CE4E5B9)
"""Odd multipliers of the SplitMix64 random generator."""


def words(text: str) -> list[bytes]:
    """Return the words of a text in lower case and in one form of Unicode (NFKC), without
    punctuation, as UTF-8."""
    if text.isascii():  # the same words in a third of the time
        return _ASCII_WORDS.findall(text.encode().lower())
    texts = _WORDS.findall(unicodedata.normalize("NFKC", text).casefold())
    return [word.encode("utf-8", "surrogatepass") for word in texts]


def ngram_hashes(text: str, n: int) -> Hashes:
    """Return the 64-bit hashes of all runs of `n` words of a text, sorted and unique. A text with
    fewer words is one run; a text without words has none."""
    texts = words(text)
    if not texts:
        return np.empty(0, np.uint64)
    word_hashes = np.fromiter(map(xxh64_intdigest, texts), np.uint64, len(texts))
    return np.unique(_runs(word_hashes, min(n, len(texts))))


def _runs(hashes: Hashes, n: int) -> Hashes:
    """Return a hash of each run of n hashes, which depends on their order."""
    number = len(hashes) - n + 1
    runs = np.full(number, n, np.uint64)
    for index in range(n):
        runs = mixed(runs * _ODD + hashes[index : index + number])
    return runs


def mixed(values: Hashes) -> Hashes:
    """Mix values so that a change of any bit changes about half of the bits."""
    values = (values ^ (values >> np.uint64(30))) * _MIX
    return values ^ (values >> np.uint64(31))


def jaccard(a: Hashes, b: Hashes) -> float:
    """Return the Jaccard similarity of two sets (sorted, each element once): the number of common
    elements over that of all elements. Two empty sets are equal."""
    if not len(a) and not len(b):
        return 1.0
    both = len(np.intersect1d(a, b, assume_unique=True))
    return both / (len(a) + len(b) - both)
