"""The measured cost of `engine.deterministic` on a GPU (docs/benchmarks/determinism.md, H200)."""

from __future__ import annotations

from typing import NamedTuple


class Price(NamedTuple):
    """The likely factor by which steps take longer, and the measurement behind it in words."""

    times: float
    text: str


DECODE = Price(
    1.0,
    "engine.deterministic cost less than 1% of models with attention or gated delta networks, "
    "and 4% of decoding in FP8",
)
BLOCKS = Price(
    1.0,
    "engine.deterministic cost nothing of block diffusion while all rows fit in the cache, up "
    "to half as long again where they do not",
)
SCORED = Price(1.05, "engine.deterministic made scored answers take 4% to 7% longer")
