"""Renders chat templates in a sandbox with limits, and with a fixed date.

Chat templates come with a model, so they are untrusted code. transformers offers no way to choose
the Jinja environment of chat templates, and its own has no limits. Therefore `bound_chat_templates`
replaces the function of transformers that compiles templates, once for the process.
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
    """Make chat templates see this day, YYYY-MM-DD, as the current date, within the `with` block.
    None stands for the real date."""
    token = _DAY.set(None if day is None else datetime.fromisoformat(day))
    try:
        yield
    finally:
        _DAY.reset(token)


def today() -> str:
    """Return the current day as YYYY-MM-DD."""
    return date.today().isoformat()


def _strftime_now(format: str) -> str:
    return (_DAY.get() or datetime.now()).strftime(format)


@cache
def bound_chat_templates() -> None:
    """Make transformers render all chat templates in a `BoundedEnvironment` from now on, with the
    filters, globals and extensions that transformers gives them. Further calls have no effect."""
    compile_freely = chat_template_utils._compile_jinja_template

    @lru_cache(_COMPILED)
    def compile_bounded(source: str) -> Any:
        default = compile_freely("").environment
        environment = BoundedEnvironment(
            filters=default.filters,
            variables={**default.globals, "strftime_now": _strftime_now},
            trim_blocks=default.trim_blocks,
            lstrip_blocks=default.lstrip_blocks,
            extensions=[type(extension) for extension in default.extensions.values()],
        )
        return environment.from_string(source)

    chat_template_utils._compile_jinja_template = compile_bounded
