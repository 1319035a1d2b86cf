"""Exports columns of rows unchanged, as JSON lines, CSV or plain text: `batchgen export` without
`--to`."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import pyarrow as pa

from batchgen.pipelines.publish.finished_rows import FinishedRows, is_set, open_rows
from batchgen.pipelines.publish.row_values import rows_where
from batchgen.pipelines.publish.trainers.export_files import text_file
from batchgen.storage.folder.open_folder import open_job_reader
from batchgen.util.errors import ConfigError
from batchgen.util.shorten import some_names
from batchgen.util.text.row_json import row_reader
from batchgen.util.text.row_writers import WRITERS, spreadsheet


def export_text(
    user_path: str,
    path: Path | None,
    *,
    form: str | None = None,
    columns: Sequence[str] | None = None,
    where: str | None = None,
    quote: bool = False,
    at: Path | None = None,
) -> int:
    """Write columns of the rows of a job or set, and return the number of rows.

    Args:
        user_path: the folder as the user typed it.
        path: a new file; None for standard output.
        form: one of WRITERS; by default, the one that the file's name implies.
        columns: the columns to write; None for all, or for the generated text if `form` is txt.
        where: an expression that rows must make true. It needs a complete job or a set.
        quote: put an apostrophe before values that spreadsheets would take for formulas.
        at: the path to write to instead; the caller renames it to `path` later.

    Raises:
        ConfigError: an option does not fit the rows, or no row is finished.
    """
    form = form or export_format(path)
    if quote and form != "csv":
        raise ConfigError(f"export --quote-formulas is for CSV, and the format is {form}")
    source = _columns_of(user_path, form, columns, where)
    if form == "txt" and len(source.schema) != 1:
        raise ConfigError("export --format txt writes one column: name one in --columns")
    with text_file(path, at) as file:
        write = (spreadsheet if quote else WRITERS[form])(file, source.schema.names)
        count = 0
        for row in source.rows:
            write(row)
            count += 1
    return count


class _Source(NamedTuple):
    """The rows to write, and the schema of their columns."""

    schema: pa.Schema
    rows: Iterator[Mapping[str, Any]]


def _columns_of(
    user_path: str, form: str, columns: Sequence[str] | None, where: str | None
) -> _Source:
    """Open the rows to write. Without `where`, a job may still be running."""
    if where is not None or is_set(user_path):
        rows = open_rows(user_path)
        names = export_columns(rows, form, columns, where)
        schema = pa.schema([rows.schema.field(name) for name in names])
        return _Source(schema, rows_where(rows, where, names))
    reader = open_job_reader(user_path)
    columns = columns or ([reader.text_column] if form == "txt" else None)
    schema = reader.fields(columns)
    if schema is None:
        display_name = reader.storage.display_name
        raise ConfigError(f"no row of {display_name} is finished yet: there is nothing to export")
    return _Source(schema, map(row_reader(schema), reader.rows(schema.names)))


def export_columns(
    rows: FinishedRows, form: str, columns: Sequence[str] | None, where: str | None
) -> Sequence[str]:
    """Return the columns to write. Raises ConfigError if a column does not exist, or if `where` is
    not an expression over the columns."""
    names = columns or ([rows.text_column] if form == "txt" else rows.schema.names)
    if unknown := [name for name in names if name not in rows.schema.names]:
        raise ConfigError(
            f"the rows of {rows.user_path} have no column {unknown[0]!r}: choose among "
            f"{some_names(rows.schema.names, unknown[0])}"
        )
    if form == "txt" and len(names) != 1:
        raise ConfigError("export --format txt writes one column: name one in --columns")
    if where is not None:
        rows.columns.expression("--where", where)
    return names


def export_format(path: Path | None) -> str:
    """Return the format that a file's name implies; JSON lines for standard output."""
    if path is None:
        return "jsonl"
    suffix = Path(path.name.removesuffix(".gz")).suffix
    name = {".json": "jsonl"}.get(suffix, suffix.removeprefix("."))
    if name not in WRITERS:
        raise ConfigError(
            f"--out {path.name}: its name does not say the format: add --format jsonl, csv or txt"
        )
    return name
