"""Which columns of a job's rows are shown, and how they are printed."""

from __future__ import annotations

import shutil
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from functools import cached_property
from typing import Any

import pyarrow as pa

from batchgen.folder.read_job import JobFolderReader
from batchgen.prompts.used_columns import used_columns
from batchgen.texts.row_json import json_readers, json_text
from batchgen.texts.row_text import IN_HEADING, RowText


class RowView:
    """Prints rows of a job: for people, or as JSON lines.

    Args:
        reader: of the job.
        columns: that the user named; None chooses those of the prompt, the text and the error, and
            for JSON all.
        as_json: print an object per row.
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
        """The columns of a row that `print` needs, unless it prints whole rows. Some row must be
        finished, because before that nobody knows the columns."""
        if self._columns is None:
            return list(self._schema.names)
        known = set(self._schema.names)
        return [n for n in dict.fromkeys([*IN_HEADING, *self._columns]) if n in known]

    def print(self, rows: Iterable[dict[str, Any]], *, whole: bool = False) -> int:
        """Print rows and return how many there were.

        Args:
            whole: print all columns, and texts to their end.
        """
        count = 0
        for row in rows:
            for name, read in self._readers.items():
                if name in row:
                    row[name] = read(row[name])
            print(self._json(row) if self._as_json else self._text(row, whole), flush=True)
            count += 1
        return count

    def _json(self, row: dict[str, Any]) -> str:
        return json_text(row if self._named is None else {name: row[name] for name in self._named})

    def _text(self, row: dict[str, Any], whole: bool) -> str:
        columns = self._columns
        if columns is None or (whole and self._named is None):
            columns = [name for name in row if name not in IN_HEADING]
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
    def _readers(self) -> dict[str, Callable[[Any], Any]]:
        return json_readers(self._schema)

    @cached_property
    def _columns(self) -> list[str] | None:
        """What is shown of a row; None is all."""
        if self._named is not None:
            self._reader.fields(self._named)  # refuses columns that are not there
            return list(dict.fromkeys([*self._named, *([] if self._as_json else ["error"])]))
        if self._as_json:
            return None
        inputs = input_columns(self._reader.config, self._schema)
        return [*inputs, self._reader.text_column, "error"]


def input_columns(config: Mapping[str, Any], schema: pa.Schema) -> list[str]:
    """The columns that say what a row was asked: those of its prompt, else all of the data set.

    Args:
        config: the job's, by group; may be empty.
        schema: of its rows.
    """
    used = [name for name in used_columns(config.get("prompt", {})) if name in schema.names]
    return used or [field.name for field in schema if _is_input(field)]


def of_sample(rows: Iterable[dict[str, Any]], sample: int | None) -> Iterator[dict[str, Any]]:
    """The rows of one sample; None takes all."""
    return (row for row in rows if sample is None or row["sample_index"] == sample)


def _is_input(field: pa.Field) -> bool:
    """Whether the column was copied from the data set."""
    return (field.metadata or {}).get(b"meaning") == b"as in the input"


def terminal_width() -> int:
    """Columns of the terminal, 80 if there is none."""
    return shutil.get_terminal_size((80, 24)).columns
