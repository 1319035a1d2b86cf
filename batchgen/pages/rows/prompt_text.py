"""Reconstructs the prompt of a row from what the job's folder has stored.

`PromptText.parts` returns it in parts, such as `[("system", "Be brief."), ("user", "1+1?")]`.
`RowPage` shows them.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import pyarrow as pa

from batchgen.pages.tokens.token_boxes import Decode
from batchgen.util.errors import ConfigError
from batchgen.util.templates.used_columns import prompt_templates, used_columns
from batchgen.util.text.row_json import plain_text

Part = tuple[str, str]
"""The speaker's role or the column's name, and the text."""


class PromptText:
    """Finds the prompt of a row in what the job has stored.

    The prompt is the text of `prompt_token_ids`, where rows have these. Else the templates of the
    configuration are filled again; where a column of theirs was not copied, the columns that are
    there stand for the prompt.

    Args:
        config: the group `prompt` of the job.
    """

    def __init__(self, config: Mapping[str, Any], schema: pa.Schema, decode: Decode | None) -> None:
        self._decode, self._names = decode, list(schema.names)
        self._messages: str | None = config.get("messages_column")
        self._used = [name for name in used_columns(config) if name in self._names]
        self._templates = self._compiled(config)

    def _compiled(
        self, config: Mapping[str, Any]
    ) -> list[tuple[str, Callable[[Mapping[str, Any], int], str]]]:
        from batchgen.util.templates.row_templates import RowTemplate

        try:
            return [
                (key, RowTemplate(f"prompt.{key}", source, self._names).render)
                for key, source in prompt_templates(config)
            ]
        except ConfigError:  # a column was not copied
            return []

    def parts(self, row: Mapping[str, Any]) -> list[Part]:
        """Return the prompt of a row, in parts; empty if nothing is known of it."""
        ids = row.get("prompt_token_ids")
        if ids is not None and self._decode is not None:
            return [("prompt", self._decode([int(id) for id in ids]))]
        try:
            parts = [(key, render(row, row["row_index"])) for key, render in self._templates]
        except ValueError:  # a RequestError: the row had no prompt, and its error says why
            parts = []
        return [*parts, *self._conversation(row)] or [
            (name, plain_text(row[name])) for name in self._used if row.get(name) is not None
        ]

    def _conversation(self, row: Mapping[str, Any]) -> list[Part]:
        """Return the messages in the column of a conversation."""
        value: Any = row
        for key in (self._messages or "").split("."):
            value = value.get(key) if isinstance(value, Mapping) else None
        if not isinstance(value, list) or not all(isinstance(m, Mapping) for m in value):
            return []
        return [
            (str(message.get("role", message.get("from", ""))), plain_text(content))
            for message in value
            if (content := message.get("content", message.get("value"))) is not None
        ]
