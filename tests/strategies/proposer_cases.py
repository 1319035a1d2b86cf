"""The cases in which every proposer of speculative decoding is tried."""

from __future__ import annotations

import itertools
from collections.abc import Iterable
from typing import Any

import pytest


def proposer_cases(proposers: Iterable[str]) -> list[Any]:
    """Parameters (name, k, hard, overlap). Quick are the longest drafts of each proposer, and one
    case of short ones that is hard and overlaps.
    """
    return [
        pytest.param(
            name,
            k,
            hard,
            overlap,
            id=f"{name}-{k}{'-hard' * hard}{'-overlap' * overlap}",
            marks=[] if k == 7 or (hard and overlap and k <= 3) else [pytest.mark.slow],
        )
        for (name, k), (hard, overlap) in zip(
            itertools.product(proposers, (1, 2, 3, 5, 7)),
            itertools.cycle([(False, False), (True, True), (True, False), (False, True)]),
        )
    ]
