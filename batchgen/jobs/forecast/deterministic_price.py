"""What `engine.deterministic` costs on a GPU, as it was measured: docs/benchmarks/determinism.md,
2026-11-27, H200."""

from __future__ import annotations

from typing import NamedTuple


class Price(NamedTuple):
    """How many times as long steps take, likely, and what was measured, in words."""

    times: float
    text: str


DECODE = Price(
    1.0,
    "engine.deterministic cost -1.3% to -0.2% of dense models and 0.5% of gated delta networks, "
    "and was not measured of other families",
)
BLOCKS = Price(1.15, "engine.deterministic cost 6% to 23% of block diffusion")
SCORED = Price(1.5, "engine.deterministic made scored answers take about half as long again")
