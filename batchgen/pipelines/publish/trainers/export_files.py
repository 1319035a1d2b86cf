"""Writes exported rows as JSON lines or Parquet, and splits them into tables for folders, with
bounded memory."""

from __future__ import annotations

import gzip
import sys
from collections.abc import Iterable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from io import TextIOWrapper
from itertools import islice
from pathlib import Path
from typing import Any, TextIO

import pyarrow as pa
import pyarrow.parquet as pq

from batchgen.pipelines.publish.data_folder import ROWS_PER_GROUP
from batchgen.storage.stores.whole_file import whole_file
from batchgen.util.errors import ConfigError
from batchgen.util.text.row_json import json_text

Rows = Iterable[Mapping[str, Any]]
JSON_NAMES = (".jsonl", ".json", ".jsonl.gz", ".json.gz")


def tables(rows: Rows, schema: pa.Schema) -> Iterator[pa.Table]:
    """Yield the rows as tables of ROWS_PER_GROUP rows. Raises ConfigError if a value does not fit
    the schema."""
    remaining = iter(rows)
    while chunk := list(islice(remaining, ROWS_PER_GROUP)):
        for row in chunk:
            _refuse_more(row, schema)
        try:
            yield pa.Table.from_pylist(chunk, schema=schema)
        except (pa.ArrowInvalid, pa.ArrowTypeError) as error:
            raise ConfigError(f"a row does not fit into Parquet ({error}): write .jsonl") from None


def _refuse_more(row: Mapping[str, Any], schema: pa.Schema) -> None:
    """Raise ConfigError for messages with keys that the schema lacks, because Arrow would drop them
    silently."""
    for field in schema:
        value, kind = row[field.name], field.type
        if isinstance(value, list) and pa.types.is_struct(kind.value_type):
            allowed = {kind.value_type.field(i).name for i in range(kind.value_type.num_fields)}
            for message in value:
                if extra := [key for key in message if key not in allowed]:
                    raise ConfigError(
                        f"a message has {extra[0]!r} besides {', '.join(sorted(allowed))}, which "
                        "this Parquet schema cannot hold: write .jsonl"
                    )


def binary_columns(schema: pa.Schema) -> list[str]:
    """Return the columns that hold bytes, which JSON cannot represent."""
    return [field.name for field in schema if "binary" in str(field.type)]


def write_lines(rows: Rows, file: TextIO) -> int:
    """Write each row as a line of JSON, and return the number of rows."""
    count = 0
    for row in rows:
        file.write(json_text(dict(row)) + "\n")
        count += 1
    return count


def write_parquet(rows: Rows, schema: pa.Schema, path: Path, about: Mapping[str, str]) -> int:
    """Write a new Parquet file, and return the number of rows.

    Args:
        about: metadata of the file.
    """
    count = 0
    schema = schema.with_metadata(about)
    with (
        whole_file(path, f"--out {path}") as temporary,
        pq.ParquetWriter(temporary, schema, compression="zstd") as writer,
    ):
        for table in tables(rows, schema):
            writer.write_table(table)
            count += table.num_rows
    return count


@contextmanager
def text_file(path: Path | None, at: Path | None = None) -> Iterator[TextIO]:
    """Open a new text file, or standard output if `path` is None. The file is compressed if its
    name ends in .gz.

    Args:
        at: the path to write to instead; the caller renames it to `path` later.
    """
    if path is None:
        yield sys.stdout
        return
    with ExitStack() as stack:
        temporary = stack.enter_context(whole_file(at or path, f"--out {path}"))
        file: Any = stack.enter_context(temporary.open("wb"))
        if path.suffix == ".gz":  # without name and time, so that equal rows make equal bytes
            file = stack.enter_context(gzip.GzipFile("", "wb", fileobj=file, mtime=0))
        yield stack.enter_context(TextIOWrapper(file, encoding="utf-8", newline=""))
