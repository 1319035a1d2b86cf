"""The measured cost of `engine.deterministic` on a GPU (docs/benchmarks/determinism.md, H200)."""

from __future__ import annotations

from typing import NamedTuple


class Price(NamedTuple):
    """The likely factor by which steps take longer, and the measurement behind it in words."""

    times: float
    text: str


DECODE = Price(
    1.0,
    "engine.deterministic slowed models with attention or gated delta networks by less than 1%, "
    "and decoding in FP8 by 4%",
)
BLOCKS = Price(
    1.0,
    "engine.deterministic did not slow block diffusion while all rows fit in the cache, and made "
    "it take up to half as long again where they do not",
)
SCORED = Price(1.05, "engine.deterministic made scored answers take 4% to 7% longer")
