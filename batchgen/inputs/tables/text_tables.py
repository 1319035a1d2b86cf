"""Reads CSV files and plain text as Arrow tables without guessing types: cells are text unless the
user gives a type. `local_files.py` uses `CsvReader` and `text_tables`."""

from __future__ import annotations

import csv
import io
import re
import sys
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import count, islice
from pathlib import Path

import pyarrow as pa
import pyarrow.compute as pc

from batchgen.config.groups.dataset_config import AUTO
from batchgen.engine.constraint.json_schema.json_text import first_repeated
from batchgen.inputs.tables.encodings import check_encoding, open_bytes
from batchgen.inputs.tables.table_formats import check_width
from batchgen.util.errors import ConfigError
from batchgen.util.shorten import some_names

_ROWS = 10_000
"""The maximum number of rows of a table."""


def text_tables(file: Path) -> Iterator[pa.Table]:
    """Yield the lines of a text file as tables with the column `line`, without line ends and blank
    lines."""
    with _lines(file, newline=None) as lines:
        texts = (line.removesuffix("\n") for line in lines if line.strip())
        while rows := list(islice(texts, _ROWS)):
            yield pa.table({"line": pa.array(rows, pa.string())})


@dataclass(frozen=True, slots=True)
class CsvForm:
    """How the cells of CSV files are written; the attributes are as in `DatasetConfig`."""

    delimiter: str
    quote_char: str | None = AUTO
    escape_char: str | None = None

    @property
    def is_unclear(self) -> bool:
        """Whether quotes may surround cells or be text. Programs that separate cells by tabs do
        both, so this is so if `quote_char` is not set."""
        return self.quote_char == AUTO and self.delimiter == "\t"

    @property
    def quotes(self) -> str | None:
        """The character that surrounds cells; None if quotes are text. If it is unclear, quotes are
        text too, and a cell that begins with one is an error."""
        if self.is_unclear:
            return None
        return '"' if self.quote_char == AUTO else self.quote_char

    def rows(self, lines: Iterable[str]) -> Iterator[list[str]]:
        """Return an iterator over the rows of these lines, which have their line ends. Raises
        csv.Error for a wrong quote."""
        return csv.reader(
            lines,
            strict=True,
            delimiter=self.delimiter,
            escapechar=self.escape_char,
            quotechar=self.quotes,
            quoting=csv.QUOTE_NONE if self.quotes is None else csv.QUOTE_MINIMAL,
        )


class CsvReader:
    """Reads CSV files, which all have the same header.

    A cell is the text between its delimiters, spaces included. In quotes it may contain delimiters
    and line breaks. The escape character makes the next delimiter, quote, line break or escape
    character plain text. An empty cell is empty text, or null in a column to which `types` gives an
    Arrow type other than string. Blank lines are skipped. A column without a name is named by its
    position, such as `Unnamed: 0`.

    Args:
        types: the Arrow types of columns, by name.
    """

    def __init__(self, form: CsvForm, types: Mapping[str, str]) -> None:
        self._form, self._types = form, types
        self._first: tuple[Path, list[str]] | None = None

    def tables(self, file: Path) -> Iterator[pa.Table]:
        """Yield the rows of a file; at least one table, which may have no rows.

        Raises:
            ConfigError: a row has more or fewer cells than the header, a quote is never closed or
                is followed by text, an escape character comes before a letter, a cell is not of its
                type, the header differs from that of the first file, or the file is not UTF-8. The
                message names the line.
        """
        with _lines(file, newline="") as lines:
            rows = _rows(file, lines, self._form)
            with _cells_of_any_size():
                _, header = next(rows, (0, None))
            if header is None:
                raise ConfigError(f"dataset.path: {file} is empty")
            names = self._names(file, header)
            for number in count():
                with _cells_of_any_size():
                    chunk = list(islice(rows, _ROWS))
                if not chunk and number:
                    return
                yield self._table(file, names, chunk)

    def _names(self, file: Path, header: Sequence[str]) -> list[str]:
        """Return the names of the columns in the header of a file. Raises ConfigError if the header
        is invalid or differs from that of the first file."""
        names = [name or f"Unnamed: {index}" for index, name in enumerate(header)]
        check_width(len(names), file)
        if (twice := first_repeated(names)) is not None:
            raise ConfigError(f"dataset.path: the header of {file} names {twice!r} twice")
        for name in self._types:
            if name not in names:
                raise ConfigError(
                    f"dataset.types: {file} has no column {name!r}: choose among "
                    f"{some_names(names, name)}"
                )
        if self._first is None:
            self._first = (file, names)
        elif set(names) != set(self._first[1]):
            other, others = self._first
            raise ConfigError(
                f"dataset.path: {file} has the columns {some_names(names)}, and {other} has "
                f"{some_names(others)}: give all files the same header"
            )
        return names

    def _table(self, file: Path, names: list[str], rows: list[tuple[int, list[str]]]) -> pa.Table:
        """Return rows as a table with the columns in the order of the first file. Each row comes
        with its line number."""
        for line, row in rows:
            if len(row) != len(names):
                delimiter, quotes = self._form.delimiter, self._form.quotes
                cells = f"cells that hold {delimiter!r}"
                hint = f"put {cells} in quotes" if quotes else f"{cells} need dataset.quote_char"
                raise ConfigError(
                    f"dataset.path: {file}, line {line}: {len(row)} cells, and the header has "
                    f"{len(names)}: {hint}, or set dataset.delimiter"
                )
        assert self._first is not None
        columns = {}
        for name in self._first[1]:
            index = names.index(name)
            cells = pa.array([row[index] for _, row in rows], pa.string())
            if name in self._types:
                cells = self._typed(file, name, cells, [line for line, _ in rows])
            columns[name] = cells
        return pa.table(columns)

    def _typed(self, file: Path, name: str, cells: pa.Array, lines: list[int]) -> pa.Array:
        """Convert the cells of a column to the type that the user gave. `lines` are their line
        numbers."""
        kind = pa.type_for_alias(self._types[name])
        if pa.types.is_string(kind):
            return cells
        cells = pc.if_else(pc.equal(cells, ""), pa.scalar(None, pa.string()), cells)
        try:
            return cells.cast(kind)
        except pa.ArrowInvalid:
            pairs = zip(lines, cells, strict=True)
            line, cell = next((line, cell) for line, cell in pairs if not _fits(cell, kind))
        raise ConfigError(
            f"dataset.types: {file}, line {line}: {cell.as_py()!r} in column {name!r} is not of "
            f"type {self._types[name]}"
        )


def _rows(file: Path, lines: Iterable[str], form: CsvForm) -> Iterator[tuple[int, list[str]]]:
    """Yield the rows of a CSV file, each with the number of the line in which it begins."""
    if form.escape_char is not None:
        lines = _with_clear_escapes(file, lines, form, form.escape_char)
    reader, line = form.rows(lines), 1
    while True:
        try:
            row = next(reader, None)
        except csv.Error as error:
            raise ConfigError(
                f"dataset.path: {file}, line {line}: {_wrong_quote(form, error)}"
            ) from None
        if row is None:
            return
        if form.is_unclear and any(cell.startswith('"') for cell in row):
            raise ConfigError(
                f"dataset.path: {file}, line {line}: a cell begins with a quote, and between tabs "
                "that may be text or not: set dataset.quote_char='\"' if quotes surround cells, or "
                "dataset.quote_char=null if they are text"
            )
        if row:
            yield line, row
        line = reader.line_num + 1  # type: ignore[attr-defined]


def _wrong_quote(form: CsvForm, error: csv.Error) -> str:
    """Return what is wrong with the quotes of a row, and how to fix it."""
    text = "or set dataset.quote_char=null if quotes are text"
    if str(error) == "unexpected end of data":
        return f"a quote that opens in this row is never closed: close it, {text}"
    quote = form.quotes
    escape = "" if form.escape_char else ", set dataset.escape_char if a character escapes quotes"
    return (
        f"there is text after the {quote} that closes a cell: write {quote}{quote} for a {quote} "
        f"in a cell{escape}, {text}"
    )


def _with_clear_escapes(
    file: Path, lines: Iterable[str], form: CsvForm, escape: str
) -> Iterator[str]:
    """Yield the lines. Raises ConfigError for an escape character before any other character than
    those that it can make plain text, because CSV readers differ in what that means."""
    special = "".join({escape, form.delimiter, form.quotes or '"', '"', "\n"})
    clear = re.compile(rf"{re.escape(escape)}(?:[{re.escape(special)}]|\r(?!\n))")
    for number, line in enumerate(lines, 1):
        if escape in line and (index := clear.sub("", line).find(escape)) >= 0:
            following = clear.sub("", line)[index + 1 : index + 2]
            raise ConfigError(
                f"dataset.path: {file}, line {number}: dataset.escape_char {escape} comes before "
                f"{following!r}: it belongs before a delimiter, a quote, a line end or itself; "
                f"write {escape}{escape} for the character, or set dataset.escape_char=null"
            )
        yield line


def _fits(cell: pa.Scalar, kind: pa.DataType) -> bool:
    """Return whether a cell can be converted to a type."""
    try:
        cell.cast(kind)
    except pa.ArrowInvalid:
        return False
    return True


@contextmanager
def _lines(file: Path, newline: str | None) -> Iterator[io.TextIOWrapper]:
    """Open a UTF-8 file to read its lines. Raises ConfigError for an invalid byte."""
    try:
        with io.TextIOWrapper(open_bytes(file), encoding="utf-8-sig", newline=newline) as lines:
            yield lines
    except UnicodeDecodeError:
        check_encoding(file, None)  # raises an error with the position
        raise


@contextmanager
def _cells_of_any_size() -> Iterator[None]:
    """Lift the limit of 128 KiB per cell of Python's csv module, which is one setting for the whole
    process."""
    limit = csv.field_size_limit(sys.maxsize)
    try:
        yield
    finally:
        csv.field_size_limit(limit)
