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
"""The columns that the first line of a row shows, without their names."""
_ANSWER_LINES, _INPUT_LINES = 4, 2
"""The lines that are shown of a generated text or an error, and of another text."""
_SHOWN_ITEMS = 8  # of a list
_INDENT = 2  # spaces before each line below the heading
_LEAST_ROOM = 20
"""The minimum width of values, in characters, also on a narrower terminal."""


@dataclass(frozen=True, slots=True)
class RowText:
    """Writes a row as lines.

    Attributes:
        columns: the columns to show below the heading; null values are left out.
        width: the maximum number of characters of a line.
        text_column: the column of generated text, of which more lines are shown.
        whole_texts: show all lines of texts, and not only the first ones.
        whole_lists: show all items of lists, and not only the first ones.
    """

    columns: Sequence[str]
    width: int
    text_column: str = "text"
    whole_texts: bool = False
    whole_lists: bool = False

    def lines(self, row: Mapping[str, Any]) -> list[str]:
        """Return the lines of a row: a heading, then for each column its name and its value."""
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
        """Return a value as text, before it is wrapped."""
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
        columns: the columns that the user named. None shows the columns of the prompt, the text and
            the error; as JSON, all columns.
        as_json: print each row as a line of JSON, instead of lines for people.
    """

    def __init__(
        self, reader: JobFolderReader, columns: Sequence[str] | None, *, as_json: bool
    ) -> None:
        self._reader, self._named, self._as_json = reader, columns, as_json

    def rows(self) -> Iterable[dict[str, Any]]:
        """Return all finished rows, with the columns that `print` needs without `whole`. For
        `whole` rows, the caller reads all columns.

        Raises:
            ConfigError: a column that the user named is not there.
        """
        return self._reader.rows(self.needed) if self._reader.schema is not None else ()

    @cached_property
    def needed(self) -> list[str]:
        """The columns that `print` needs without `whole`. At least one row must be finished: before
        that the columns are not known."""
        known = list(self._schema.names)
        if self._shown is None:
            return known
        return [n for n in dict.fromkeys([*_IN_HEADING, *self._shown]) if n in known]

    def print(self, rows: Iterable[dict[str, Any]], *, whole: bool = False) -> int:
        """Print rows and return their number.

        Args:
            whole: print whole texts and, unless the user named columns, all columns.
        """
        count = 0
        for row in rows:  # one sample each
            sample = self._read(row)
            text = self._json(sample) if self._as_json else self._lines(sample, whole=whole)
            print(text, flush=True)
            count += 1
        return count

    def _json(self, row: dict[str, Any]) -> str:
        return json_text(row if self._named is None else {name: row[name] for name in self._named})

    def _lines(self, row: dict[str, Any], *, whole: bool) -> str:
        columns = self._shown
        if columns is None or (whole and self._named is None):
            columns = [name for name in row if name not in _IN_HEADING]
        text = RowText(
            columns,
            width=terminal_width(),
            text_column=self._reader.text_column,
            whole_texts=whole,
            # Lists, such as token ids, are long: all items only of columns that the user asked for.
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
        """A function that decodes the columns of a row that hold JSON."""
        return row_reader(self._schema)

    @cached_property
    def _shown(self) -> list[str] | None:
        """The columns that are shown of a row; None means all."""
        if self._named is not None:
            self._reader.fields(self._named)  # refuses columns that are not there
            return list(dict.fromkeys([*self._named, *([] if self._as_json else ["error"])]))
        if self._as_json:
            return None
        columns = RowColumns(self._reader.config, self._schema)
        thoughts = [] if columns.reasoning is None else [columns.reasoning]
        images = [] if columns.images is None else [columns.images]
        prompt_columns = columns.prompt_columns
        return [*prompt_columns, *images, *thoughts, self._reader.text_column, "error"]


def of_sample(rows: Iterable[dict[str, Any]], sample: int | None) -> Iterator[dict[str, Any]]:
    """Yield the rows with the sample number `sample`, or with None all rows."""
    return (row for row in rows if sample is None or row["sample_index"] == sample)


def message_lines(row: Mapping[str, Any]) -> list[str]:
    """Return the error message of a row, after the row's name, as at most _ANSWER_LINES lines."""
    first = f"{row_name(row['row_id'], row['sample_index'])}: {row['message']}"
    return [
        " " * _INDENT + text for text in wrapped(first, terminal_width() - _INDENT, _ANSWER_LINES)
    ]


def terminal_width() -> int:
    """Return the width of the terminal in characters; 80 without a terminal."""
    return shutil.get_terminal_size((80, 24)).columns
