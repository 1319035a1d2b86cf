"""Random numbers as a pure function of a seed and an index, without the state of a generator."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

_STEP = np.uint64(0x9E3779B97F4A7C15)


def random_words(seed: int, shape: tuple[int, ...], start: int = 0) -> npt.NDArray[np.uint64]:
    """Return independent random 64-bit words [*shape].

    They are elements `start`, `start` + 1, … of the sequence of the seed, computed by SplitMix64
    (Steele, Lea and Flood 2014): a hash of seed + (index + 1) · _STEP.
    """
    numbers = np.arange(start + 1, start + 1 + int(np.prod(shape)), dtype=np.uint64)
    words = np.uint64(seed % 2**64) + numbers * _STEP
    words = (words ^ (words >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    words = (words ^ (words >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return (words ^ (words >> np.uint64(31))).reshape(shape)
