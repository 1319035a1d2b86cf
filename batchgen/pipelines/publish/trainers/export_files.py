"""Writes exported rows as JSON lines, as Parquet or as a folder, with bounded memory."""

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
    """The rows as tables of ROWS_PER_GROUP. Raises ConfigError if a value is of another type."""
    known = iter(rows)
    while chunk := list(islice(known, ROWS_PER_GROUP)):
        for row in chunk:
            _refuse_more(row, schema)
        try:
            yield pa.Table.from_pylist(chunk, schema=schema)
        except (pa.ArrowInvalid, pa.ArrowTypeError) as error:
            raise ConfigError(f"a row does not fit into Parquet ({error}): write .jsonl") from None


def _refuse_more(row: Mapping[str, Any], schema: pa.Schema) -> None:
    """Refuse messages with keys that the schema does not have, which Arrow would leave out."""
    for field in schema:
        value, kind = row[field.name], field.type
        if isinstance(value, list) and pa.types.is_struct(kind.value_type):
            known = {kind.value_type.field(i).name for i in range(kind.value_type.num_fields)}
            for message in value:
                if more := [key for key in message if key not in known]:
                    raise ConfigError(
                        f"a message has {more[0]!r} besides {', '.join(sorted(known))}, which "
                        "this Parquet schema cannot hold: write .jsonl"
                    )


def binary_columns(schema: pa.Schema) -> list[str]:
    """The columns that hold bytes, for which JSON has no place."""
    return [field.name for field in schema if "binary" in str(field.type)]


def write_lines(rows: Rows, file: TextIO) -> int:
    """Write the JSON of each row in a line; returns their number."""
    count = 0
    for row in rows:
        file.write(json_text(dict(row)) + "\n")
        count += 1
    return count


def write_parquet(rows: Rows, schema: pa.Schema, path: Path, about: Mapping[str, str]) -> int:
    """Write a new Parquet file with some metadata; returns the number of rows."""
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
    """A new text file, compressed if its name ends in .gz, or standard output; `at` is where it is
    written instead, to get its name later."""
    if path is None:
        yield sys.stdout
        return
    with ExitStack() as stack:
        temporary = stack.enter_context(whole_file(at or path, f"--out {path}"))
        file: Any = stack.enter_context(temporary.open("wb"))
        if path.suffix == ".gz":  # equal rows make equal bytes: no name and no time is in it
            file = stack.enter_context(gzip.GzipFile("", "wb", fileobj=file, mtime=0))
        yield stack.enter_context(TextIOWrapper(file, encoding="utf-8", newline=""))
