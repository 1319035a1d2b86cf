"""Prints rows of a job on the terminal, as lines for people or as JSON lines: `batchgen show`."""

from __future__ import annotations

import shutil
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import pyarrow as pa

from batchgen.pages.rows.row_facts import RowColumns, RowFacts
from batchgen.pages.rows.row_pictures import image_text
from batchgen.storage.folder.read_job import JobFolderReader
from batchgen.storage.shards.column_kinds import PROMPT_IMAGES
from batchgen.util.shorten import wrapped
from batchgen.util.text.row_json import json_text, plain_text, row_reader
from batchgen.util.text.text_table import row_name

_IN_HEADING = (
    "row_id",
    "sample_index",
    "finish_reason",
    "num_generated_tokens",
    "num_forwards",  # not in every job
)
_ANSWER_LINES, _INPUT_LINES = 4, 2
_SHOWN_ITEMS = 8
_INDENT = 2
_LEAST_ROOM = 20


@dataclass(frozen=True, slots=True)
class RowText:
    """Writes a row as lines.

    Attributes:
        columns: what is shown below the heading, apart from nulls.
        text_column: the column of generated text, of which more lines are shown.
        whole_texts, whole_lists: show all; else first lines and first items.
    """

    columns: Sequence[str]
    width: int
    text_column: str = "text"
    whole_texts: bool = False
    whole_lists: bool = False

    def lines(self, row: Mapping[str, Any]) -> list[str]:
        """The heading, then a block for each column."""
        values = {name: row[name] for name in self.columns if row[name] is not None}
        margin = max((len(name) for name in values), default=0) + 2
        room = max(self.width - _INDENT - margin, _LEAST_ROOM)
        lines = [RowFacts(row).heading]
        for name, value in values.items():
            limit = _ANSWER_LINES if name in (self.text_column, "error") else _INPUT_LINES
            texts = wrapped(self._text(name, value), room, None if self.whole_texts else limit)
            labels = [name, *[""] * (len(texts) - 1)]
            lines += [
                f"{'':{_INDENT}}{label:<{margin}}{text}".rstrip()
                for label, text in zip(labels, texts, strict=True)
            ]
        return lines

    def _text(self, name: str, value: Any) -> str:
        if name == "error":
            return f"{value['type']}: {value['message']}"
        if name == PROMPT_IMAGES and not self.whole_lists:
            return "; ".join(map(image_text, value))
        if isinstance(value, str):
            return value.strip("\n")
        if isinstance(value, list) and not self.whole_lists and len(value) > _SHOWN_ITEMS:
            return f"{json_text(value[:_SHOWN_ITEMS])[:-1]}, … {len(value):,} in all]"
        return plain_text(value)


class RowPrinter:
    """Prints rows of a job.

    Args:
        columns: that the user named; None chooses the columns of the prompt, the text and the
            error, and for JSON all columns.
    """

    def __init__(
        self, reader: JobFolderReader, columns: Sequence[str] | None, *, as_json: bool
    ) -> None:
        self._reader, self._named, self._as_json = reader, columns, as_json

    def rows(self) -> Iterable[dict[str, Any]]:
        """All finished rows, with the columns that `print` needs.

        Raises:
            ConfigError: a column that the user named is not there.
        """
        return self._reader.rows(self.needed) if self._reader.schema is not None else ()

    @cached_property
    def needed(self) -> list[str]:
        """The columns that `print` needs, unless it prints whole rows. Some row must be finished:
        before that nobody knows the columns."""
        known = list(self._schema.names)
        if self._shown is None:
            return known
        return [n for n in dict.fromkeys([*_IN_HEADING, *self._shown]) if n in known]

    def print(self, rows: Iterable[dict[str, Any]], *, whole: bool = False) -> int:
        """Print rows and return how many there were.

        Args:
            whole: print all columns, and texts to their end.
        """
        count = 0
        for row in rows:
            samples = self._read(row)
            print(self._json(samples) if self._as_json else self._text(samples, whole), flush=True)
            count += 1
        return count

    def _json(self, row: dict[str, Any]) -> str:
        return json_text(row if self._named is None else {name: row[name] for name in self._named})

    def _text(self, row: dict[str, Any], whole: bool) -> str:
        columns = self._shown
        if columns is None or (whole and self._named is None):
            columns = [name for name in row if name not in _IN_HEADING]
        text = RowText(
            columns,
            terminal_width(),
            self._reader.text_column,
            whole_texts=whole,
            whole_lists=self._named is not None,
        )
        return "\n" + "\n".join(text.lines(row))

    @cached_property
    def _schema(self) -> pa.Schema:
        schema = self._reader.schema
        assert schema is not None
        return schema

    @cached_property
    def _read(self) -> Callable[[Mapping[str, Any]], dict[str, Any]]:
        return row_reader(self._schema)

    @cached_property
    def _shown(self) -> list[str] | None:
        """What is shown of a row; None is all."""
        if self._named is not None:
            self._reader.fields(self._named)  # refuses columns that are not there
            return list(dict.fromkeys([*self._named, *([] if self._as_json else ["error"])]))
        if self._as_json:
            return None
        columns = RowColumns(self._reader.config, self._schema)
        thoughts = [] if columns.reasoning is None else [columns.reasoning]
        images = [] if columns.images is None else [columns.images]
        return [*columns.asked, *images, *thoughts, self._reader.text_column, "error"]


def of_sample(rows: Iterable[dict[str, Any]], sample: int | None) -> Iterator[dict[str, Any]]:
    """The rows of one sample; None takes all."""
    return (row for row in rows if sample is None or row["sample_index"] == sample)


def message_lines(row: Mapping[str, Any]) -> list[str]:
    """The message of an error row, with the row's name before it."""
    first = f"{row_name(row['row_id'], row['sample_index'])}: {row['message']}"
    return [
        " " * _INDENT + text for text in wrapped(first, terminal_width() - _INDENT, _ANSWER_LINES)
    ]


def terminal_width() -> int:
    """Columns of the terminal, 80 if there is none."""
    return shutil.get_terminal_size((80, 24)).columns
