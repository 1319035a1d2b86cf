"""A row of a job as lines for people."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from batchgen.texts.row_json import json_text, plain_text
from batchgen.util.shorten import wrapped

IN_HEADING = (
    "row_id",
    "sample_index",
    "finish_reason",
    "num_generated_tokens",
    "num_forwards",
)
"""The columns that the first line of a row shows; the last is not in every job."""
_ANSWER_LINES, _INPUT_LINES = 4, 2
_SHOWN_ITEMS = 8
_INDENT = 2
_LEAST_ROOM = 20


@dataclass(frozen=True, slots=True)
class RowText:
    """How rows are written.

    Attributes:
        columns: what is shown of each row below its first line; columns that are null are left out.
        width: columns of the terminal.
        text_column: the column of generated text, of which more lines are shown.
        whole_texts: show texts to their end; else their first lines.
        whole_lists: show all of a list; else its first items and how many there are.
    """

    columns: Sequence[str]
    width: int
    text_column: str = "text"
    whole_texts: bool = False
    whole_lists: bool = False

    def lines(self, row: Mapping[str, Any]) -> list[str]:
        """A first line that says which row it is and how it ended, then a block per column."""
        shown = {name: row[name] for name in self.columns if row[name] is not None}
        margin = max((len(name) for name in shown), default=0) + 2
        lines = [heading(row)]
        for name, value in shown.items():
            most = _ANSWER_LINES if name in (self.text_column, "error") else _INPUT_LINES
            room = max(self.width - _INDENT - margin, _LEAST_ROOM)
            texts = wrapped(self._text(name, value), room, None if self.whole_texts else most)
            labels = [name.ljust(margin), *[" " * margin] * (len(texts) - 1)]
            lines += [
                (" " * _INDENT + label + text).rstrip()
                for label, text in zip(labels, texts, strict=True)
            ]
        return lines

    def _text(self, name: str, value: Any) -> str:
        if name == "error":
            return f"{value['type']}: {value['message']}"
        if isinstance(value, str):
            return value.strip("\n")
        if isinstance(value, list) and not self.whole_lists and len(value) > _SHOWN_ITEMS:
            return f"{json_text(value[:_SHOWN_ITEMS])[:-1]}, … {len(value):,} in all]"
        return plain_text(value)


def heading(row: Mapping[str, Any]) -> str:
    """Which row it is, how it ended, and what it cost."""
    facts = [row_name(row["row_id"], row["sample_index"]), str(row["finish_reason"])]
    if row["num_generated_tokens"] or row["finish_reason"] != "error":
        facts.append(f"{row['num_generated_tokens']:,} tokens")
    if row.get("num_forwards") is not None:
        facts.append(f"{row['num_forwards']:,} forwards")
    return ", ".join(facts)


def row_name(row_id: str, sample_index: int) -> str:
    """`row ID`, and which of its samples if it is not the first."""
    return f"row {row_id}" + (f", sample {sample_index}" if sample_index else "")


def message_lines(row: Mapping[str, Any], width: int) -> list[str]:
    """The message of an error row, with the row's name before it."""
    first = f"{row_name(row['row_id'], row['sample_index'])}: {row['message']}"
    return [" " * _INDENT + line for line in wrapped(first, width - _INDENT, _ANSWER_LINES)]
