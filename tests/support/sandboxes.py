"""Whether programs can be run here, for tests that need that."""

from __future__ import annotations

from functools import cache

import pytest

from batchgen.evals.programs.interpreter import interpreter
from batchgen.evals.programs.probe import check_sandbox
from batchgen.util.errors import ConfigError


@cache
def sandbox_missing() -> str | None:
    """Why no program can be run here; None if one can."""
    try:
        check_sandbox(interpreter(None, ()))
    except ConfigError as error:
        return str(error)
    return None


def need_sandbox() -> None:
    """Skip a test where there is no bubblewrap, or where it may make no sandbox."""
    if missing := sandbox_missing():
        pytest.skip(missing)
