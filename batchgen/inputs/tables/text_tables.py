"""Reads CSV files and plain text as Arrow tables in which text stays the text that it is."""

from __future__ import annotations

import csv
import io
import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from itertools import chain, count, islice
from pathlib import Path

import pyarrow as pa
import pyarrow.compute as pc

from batchgen.engine.constraint.json_schema.json_text import first_repeated
from batchgen.inputs.tables.encodings import check_encoding, open_bytes
from batchgen.inputs.tables.table_formats import check_width
from batchgen.util.errors import ConfigError
from batchgen.util.shorten import some_names

_ROWS = 10_000
"""Rows of a table."""
_END = "\ue000 the end of the file \ue000"
"""A line that is put behind the last one: inside quotes that are never closed, it is not a row."""


def text_tables(file: Path) -> Iterator[pa.Table]:
    """The lines of a text file as a column `line`, without their line ends and without blank
    lines."""
    with _lines(file, newline=None) as lines:
        texts = (line.removesuffix("\n") for line in lines if line.strip())
        while rows := list(islice(texts, _ROWS)):
            yield pa.table({"line": pa.array(rows, pa.string())})


class CsvReader:
    """Reads CSV files, which all have the same header.

    A cell is the text between its delimiters, with the spaces that it has there; in quotes it may
    hold delimiters and line breaks. An empty cell is empty text, or null in a column that `types`
    gives another Arrow type than string. Lines with nothing on them are left out. A column without
    a name gets one from its place, such as `Unnamed: 0`.
    """

    def __init__(self, delimiter: str, types: Mapping[str, str]) -> None:
        self._delimiter, self._types = delimiter, types
        self._first: tuple[Path, list[str]] | None = None

    def tables(self, file: Path) -> Iterator[pa.Table]:
        """The rows of a file; at least one table, which may have no rows.

        Raises:
            ConfigError: a row has more or fewer cells than the header, a quote is never closed, a
                cell is not of its type, the header differs from that of the file before, or the
                file is not UTF-8. The message names the line.
        """
        with _lines(file, newline="") as lines:
            reader = csv.reader(chain(lines, [_END]), delimiter=self._delimiter)
            rows = _rows(file, reader)
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
        names = [name or f"Unnamed: {place}" for place, name in enumerate(header)]
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
        for line, row in rows:
            if len(row) != len(names):
                raise ConfigError(
                    f"dataset.path: {file}, line {line}: {len(row)} cells, and the header has "
                    f"{len(names)}: put cells that hold {self._delimiter!r} in quotes, or set "
                    "dataset.delimiter"
                )
        assert self._first is not None
        columns = {}
        for name in self._first[1]:
            place = names.index(name)
            cells = pa.array([row[place] for _, row in rows], pa.string())
            if name in self._types:
                cells = self._typed(file, name, cells, [line for line, _ in rows])
            columns[name] = cells
        return pa.table(columns)

    def _typed(self, file: Path, name: str, cells: pa.Array, lines: list[int]) -> pa.Array:
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
            f"dataset.types: {file}, line {line}: {cell.as_py()!r} in column {name!r} is no "
            f"{self._types[name]}"
        )


def _rows(file: Path, reader: Iterator[list[str]]) -> Iterator[tuple[int, list[str]]]:
    """The rows of a CSV file, each with the number of the line in which it begins."""
    line = 1
    for row in reader:
        if row == [_END]:
            return
        if row and row[-1].endswith(_END):
            raise ConfigError(
                f"dataset.path: {file}, line {line}: a quote that opens in this row is never closed"
            )
        if row:
            yield line, row
        line = reader.line_num + 1  # type: ignore[attr-defined]


def _fits(cell: pa.Scalar, kind: pa.DataType) -> bool:
    try:
        cell.cast(kind)
    except pa.ArrowInvalid:
        return False
    return True


@contextmanager
def _lines(file: Path, newline: str | None) -> Iterator[io.TextIOWrapper]:
    try:
        with io.TextIOWrapper(open_bytes(file), encoding="utf-8-sig", newline=newline) as lines:
            yield lines
    except UnicodeDecodeError:
        check_encoding(file, None)  # says where
        raise


@contextmanager
def _cells_of_any_size() -> Iterator[None]:
    """Lift the limit of 128 KiB that Python's csv sets, for the whole process, to a cell."""
    limit = csv.field_size_limit(sys.maxsize)
    try:
        yield
    finally:
        csv.field_size_limit(limit)
