"""Cases of a test of which some are run only by `scripts/test --thorough` or `--all`."""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Sequence
from typing import Any

import pytest


def thorough(*cases: Any) -> list[Any]:
    """The cases as parameters that `scripts/test --thorough` runs; a tuple has several values."""
    return [_marked(case, pytest.mark.thorough) for case in cases]


def some_thorough(cases: Iterable[Any], quick: Sequence[Any]) -> list[Any]:
    """The cases as parameters, thorough but for those named quick."""
    return [case if case in quick else _marked(case, pytest.mark.thorough) for case in cases]


def some_slow(cases: Iterable[Any], quick: Sequence[Any]) -> list[Any]:
    """The cases as parameters, slow but for those named quick."""
    return [case if case in quick else _marked(case, pytest.mark.slow) for case in cases]


def _marked(case: Any, mark: pytest.MarkDecorator) -> Any:
    return pytest.param(*(case if isinstance(case, tuple) else (case,)), marks=mark)


def mark_all_but_quick(items: list[pytest.Item]) -> None:
    """Mark as thorough all cases but n of each test that is marked quick(n); of
    quick(n, thorough=m) m more, and the others as slow."""
    tests: dict[str, list[pytest.Item]] = {}
    for item in items:
        apart = any(item.get_closest_marker(name) for name in ("thorough", "slow", "gpu"))
        if item.get_closest_marker("quick") and not apart:
            tests.setdefault(item.nodeid.split("[")[0], []).append(item)
    for cases in tests.values():
        mark = cases[0].get_closest_marker("quick")
        assert mark is not None
        (number,) = mark.args
        quick = _spread(len(cases), number)
        kept = _spread(len(cases), number + mark.kwargs.get("thorough", len(cases)))
        for index, case in enumerate(cases):
            if index not in quick:
                case.add_marker(pytest.mark.thorough if index in kept else pytest.mark.slow)


def _spread(count: int, number: int) -> set[int]:
    """Indices below count, as many as `number`, far apart and in no pattern, so that parameters of
    one test that vary together all vary: multiples of the golden ratio, modulo 1."""
    golden, chosen, multiples = (5**0.5 - 1) / 2, set[int](), itertools.count()
    while len(chosen) < min(count, number):
        chosen.add(int(next(multiples) * golden % 1 * count))
    return chosen
