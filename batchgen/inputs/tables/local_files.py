"""Chooses the reader of local files by their format: batchgen's own readers, or else those of
`datasets`. The entry point is `local_rows`."""

from __future__ import annotations

import glob
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import datasets
import pyarrow as pa
from datasets import DatasetBuilder

from batchgen.config.groups.dataset_config import DatasetConfig
from batchgen.inputs.tables.arrow_tables import ArrowFiles
from batchgen.inputs.tables.encodings import as_utf8, is_utf8
from batchgen.inputs.tables.json_tables import JsonColumns, json_columns, json_tables
from batchgen.inputs.tables.json_values import has_json
from batchgen.inputs.tables.table_builder import TableBuilder
from batchgen.inputs.tables.table_formats import TEXT_FORMATS, is_json_lines, json_list_as_lines
from batchgen.inputs.tables.text_tables import CsvForm, CsvReader, text_tables
from batchgen.util.errors import ConfigError

_DELIMITERS = {"csv": ",", "tsv": "\t"}


def check_reading(config: DatasetConfig, kind: str) -> None:
    """Raise ConfigError for configuration keys that do not apply to a file format."""
    for key in config.reading:
        if kind not in (TEXT_FORMATS if key == "encoding" else _DELIMITERS):
            what = "text files" if key == "encoding" else ".csv and .tsv files"
            raise ConfigError(f"dataset.{key} is for {what}, and {config.path} is {kind}: drop it")


@dataclass(frozen=True)
class LocalRows:
    """The reader of some files.

    Attributes:
        builder: yields the rows, for datasets.
        json: the columns of rows that the builder yields as JSON texts (column `ROW_TEXT`); None if
            it yields the columns themselves.
        is_mixed: whether some column has values of several types without a common one.
    """

    builder: DatasetBuilder
    json: JsonColumns | None = None
    is_mixed: bool = False


def local_rows(
    kind: str, files: Sequence[Path], config: DatasetConfig, split: str, cache: Path
) -> LocalRows:
    """Return a reader of the rows of files, in the order of the files.

    Args:
        kind: the format of all files; see `table_format`.
        config: the encoding and the form of text files.
        split: the name of the split that the rows belong to.
        cache: a folder for exactly these files, read with these options.
    """
    parts = list(files)
    if config.encoding is not None and not is_utf8(config.encoding):
        parts = [as_utf8(file, config.encoding, cache, i) for i, file in enumerate(parts)]
    if kind == "json":
        parts = [json_list_as_lines(part, cache, i) or part for i, part in enumerate(parts)]
        if {*map(is_json_lines, parts)} - {None} == {True}:  # None: an empty file
            columns = json_columns(parts, cache)
            builder = TableBuilder(lambda: json_tables(parts), split, str(cache))
            return LocalRows(builder, columns, any(map(has_json, columns.features.values())))
    if kind in ("parquet", "arrow"):
        arrow = ArrowFiles.of(parts)
        return LocalRows(TableBuilder(arrow.tables, split, str(cache)), is_mixed=arrow.is_mixed)
    read = _reader(kind, parts, config)
    if read is not None:
        return LocalRows(TableBuilder(read, split, str(cache)))
    # How one JSON value over many lines becomes a table is up to datasets.
    builder = datasets.load_dataset_builder(
        kind,
        data_files={split: [glob.escape(str(part.absolute())) for part in parts]},
        cache_dir=str(cache),
    )
    return LocalRows(builder)


def _reader(
    kind: str, files: Sequence[Path], config: DatasetConfig
) -> Callable[[], Iterator[pa.Table]] | None:
    """Return a function that reads all rows of text files; None if datasets should read them."""
    if kind == "txt":
        return lambda: (table for file in files for table in text_tables(file))
    if kind in _DELIMITERS:
        form = CsvForm(config.delimiter or _DELIMITERS[kind], config.quote_char, config.escape_char)
        return lambda: _csv(files, CsvReader(form, config.types or {}))
    return None


def _csv(files: Sequence[Path], reader: CsvReader) -> Iterator[pa.Table]:
    return (table for file in files for table in reader.tables(file))
