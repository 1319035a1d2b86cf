"""The cases in which every proposer of speculative decoding is tried."""

from __future__ import annotations

import itertools
from collections.abc import Iterable
from typing import Any

import pytest

KS = (1, 2, 3, 5, 7)
"""How many drafts."""


def proposer_cases(proposers: Iterable[str]) -> list[Any]:
    """Parameters (name, k, hard, overlap). Quick is one case of each proposer: among them are every
    k, and rows that are hard and those that are not, with and without overlap.
    """
    return [
        pytest.param(
            name,
            k,
            hard,
            overlap,
            id=f"{name}-{k}{'-hard' * hard}{'-overlap' * overlap}",
            marks=[] if i % len(KS) == (1 + 2 * (i // len(KS))) % len(KS) else [pytest.mark.slow],
        )
        for i, ((name, k), (hard, overlap)) in enumerate(
            zip(
                itertools.product(proposers, KS),
                itertools.cycle([(False, False), (True, True), (True, False), (False, True)]),
            )
        )
    ]
