"""Renders chat templates, which strangers write, in a sandbox with limits and with a fixed date.

transformers offers no way to choose the environment of chat templates, and its own has no limits.
Therefore its function that compiles templates is replaced, once for the process.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from datetime import date, datetime
from functools import cache, lru_cache
from typing import Any

from transformers.utils import chat_template_utils

from batchgen.util.templates.template_sandbox import BoundedEnvironment

_COMPILED = 128
"""The number of compiled chat templates that are cached."""
_DAY: ContextVar[datetime | None] = ContextVar("_DAY", default=None)


@contextmanager
def on_day(day: str | None) -> Iterator[None]:
    """Let chat templates write this day, YYYY-MM-DD, where they ask what day it is."""
    token = _DAY.set(None if day is None else datetime.fromisoformat(day))
    try:
        yield
    finally:
        _DAY.reset(token)


def today() -> str:
    """This day, as YYYY-MM-DD."""
    return date.today().isoformat()


def _strftime_now(format: str) -> str:
    return (_DAY.get() or datetime.now()).strftime(format)


@cache
def bound_chat_templates() -> None:
    """Let transformers render all chat templates within the bounds of `bounds` from now on, with
    the filters, globals and extensions that it gives them. May be called again.
    """
    compile_freely = chat_template_utils._compile_jinja_template

    @lru_cache(_COMPILED)
    def compile_bounded(source: str) -> Any:
        usual = compile_freely("").environment
        environment = BoundedEnvironment(
            filters=usual.filters,
            variables={**usual.globals, "strftime_now": _strftime_now},
            trim_blocks=usual.trim_blocks,
            lstrip_blocks=usual.lstrip_blocks,
            extensions=[type(extension) for extension in usual.extensions.values()],
        )
        return environment.from_string(source)

    chat_template_utils._compile_jinja_template = compile_bounded
