"""Parameters of a test of which some are run only by `scripts/test --thorough` or `--all`."""

from __future__ import annotations

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
