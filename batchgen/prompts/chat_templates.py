"""Chat templates come with models and are written by strangers: they render in a sandbox
with bounds. transformers offers no way to choose the environment of chat templates, and its own has
none, so its function that compiles them is replaced, once for the process.
"""

from __future__ import annotations

from functools import cache, lru_cache
from typing import Any

from transformers.utils import chat_template_utils

from batchgen.templates.template_sandbox import BoundedEnvironment

_COMPILED = 128
"""Chat templates that are kept compiled."""


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
            variables=usual.globals,
            trim_blocks=usual.trim_blocks,
            lstrip_blocks=usual.lstrip_blocks,
            extensions=[type(extension) for extension in usual.extensions.values()],
        )
        return environment.from_string(source)

    chat_template_utils._compile_jinja_template = compile_bounded
