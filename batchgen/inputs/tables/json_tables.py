"""Reads files of JSON lines as the texts of their rows, and finds column types that hold the values
of all rows.

`local_files.py` uses `json_columns` for the types and `json_tables` for the rows: tables with the
one column ROW_TEXT, whose values are such as `{"id": 1, "text": "a"}`. `parse_rows` and
`JsonColumns.table` make values and columns of these texts.
"""

from __future__ import annotations

import gc
import io
import json
import re
import secrets
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.json
from datasets import Features
from datasets.table import table_cast

from batchgen.inputs.tables.encodings import open_bytes
from batchgen.inputs.tables.json_values import SeenValues, has_json, json_encoder, storage_type
from batchgen.inputs.tables.table_formats import check_width, unique_members
from batchgen.util.temporary import temporary_name

ROW_TEXT = "row"
"""The column with the JSON text of each row."""
_CHUNK = 1 << 20
"""The approximate number of bytes of a file that become one table."""
_HALF_PAIR = re.compile(
    r"\\u[dD][89abAB]..(?!\\u[dD][c-fC-F])|(?<!\\u[dD][89abAB]..)\\u[dD][c-fC-F]"
)
"""An escaped UTF-16 surrogate without its partner: a high one (D800–DBFF), or a low one."""
_FEATURES, _HALVES = b"features", b"halves"
"""The metadata keys of cached `JsonColumns`."""


@dataclass(frozen=True)
class JsonColumns:
    """The columns that hold all rows of JSON lines.

    Attributes:
        features: the types of the columns, as datasets describes them; JSON if values have several
            types.
        schema: the Arrow types that store the columns.
        has_halves: whether a text may contain a lone UTF-16 surrogate, which Arrow cannot store.
    """

    features: Features
    schema: pa.Schema
    has_halves: bool

    def table(self, texts: Sequence[str]) -> pa.Table:
        """Return a table of the `features`, with JSON as text, from the JSON texts of rows."""
        kinds = self.features.arrow_schema
        if not self.has_halves and not any(map(has_json, self.features.values())):
            lines = "\n".join(texts).encode()
            size = len(lines) + 1  # one block, because a row must not be split between blocks
            return pyarrow.json.read_json(  # several times as fast as the way below
                io.BytesIO(lines),
                pyarrow.json.ReadOptions(use_threads=False, block_size=size),
                pyarrow.json.ParseOptions(explicit_schema=kinds),
            )
        arrays, rows = [], parse_rows(texts)
        for name, feature in self.features.items():
            values = [row.get(name) for row in rows]
            stored = storage_type(kinds.field(name).type)
            if encode := json_encoder(feature, stored):
                values = list(map(encode, values))
            if self.has_halves:
                values = list(map(_whole, values))
            arrays.append(pa.array(values, stored))
        table = pa.table(arrays, names=list(self.features))
        return table_cast(table, kinds) if table.schema != kinds else table


def json_tables(files: Sequence[Path]) -> Iterator[pa.Table]:
    """Yield the rows of files of JSON lines, as tables of their texts."""
    for file in files:
        for texts in _chunks(file):
            yield pa.table({ROW_TEXT: pa.array(texts, pa.string())})


def parse_rows(texts: Sequence[str]) -> list[dict[str, Any]]:
    """Parse rows from the texts that `json_tables` yields, which `json_columns` has checked."""
    with _without_collections():
        rows: list[dict[str, Any]] = json.loads(f"[{','.join(texts)}]")
    return rows


def json_columns(files: Sequence[Path], cache: Path) -> JsonColumns:
    """Find the columns of all rows in one pass over the files. The result is cached in the folder
    `cache`, which must be used for exactly these files.

    Raises:
        ValueError, RecursionError: a row is no JSON object, or has a key twice.
        ConfigError: there are too many columns.
    """
    cached = cache / "columns.arrow"
    try:
        return _unpacked(pa.ipc.read_schema(pa.py_buffer(cached.read_bytes())))
    except (OSError, pa.ArrowException):
        columns = _seen_columns(files)
    with suppress(OSError):  # rows can be read without a cache
        cache.mkdir(parents=True, exist_ok=True)
        part = temporary_name(cached)
        part.write_bytes(_packed(columns).serialize().to_pybytes())
        part.replace(cached)
    return columns


def _seen_columns(files: Sequence[Path]) -> JsonColumns:
    """Find the columns without the cache; see `json_columns`."""
    seen, has_halves = SeenValues(), False
    for file in files:
        for texts in _chunks(file):
            seen.add_fields(_checked_rows(texts))
            check_width(len(seen.fields), file)
            if not has_halves and _may_have_half("".join(texts)):  # fast, before the slow search
                has_halves = any(map(_HALF_PAIR.search, texts))
    features = Features({name: field.feature() for name, field in seen.fields.items()})
    schema = pa.schema([(name, field.stored()) for name, field in seen.fields.items()])
    return JsonColumns(features, schema, has_halves)


@contextmanager
def _without_collections() -> Iterator[None]:
    """Turn off Python's garbage collector in the `with` block. JSON creates no cycles, and the
    collector would take a third of the time of parsing."""
    was_enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_enabled:
            gc.enable()


def _checked_rows(texts: Sequence[str]) -> list[dict[str, Any]]:
    """Parse rows, and check that each text is one JSON object. Raises ValueError otherwise.

    All texts are parsed in one call, which takes half the time. A random mark between them ensures
    that no text is completed by its neighbour.
    """
    mark = secrets.token_hex(16)
    between = f',"{mark}",'
    with _without_collections():
        parsed = json.loads(f"[{between.join(texts)}]", object_pairs_hook=unique_members)
    rows: list[dict[str, Any]] = parsed[::2]
    if parsed[1::2] != [mark] * (len(texts) - 1) or set(map(type, rows)) != {dict}:
        raise ValueError("each line must hold one JSON object")
    return rows


def _may_have_half(text: str) -> bool:
    """Return whether a text may contain an escaped UTF-16 surrogate."""
    return "\\ud" in text or "\\uD" in text


def _packed(columns: JsonColumns) -> pa.Schema:
    """Convert columns into a schema that can be cached."""
    features = json.dumps(columns.features.to_dict())
    halves = str(int(columns.has_halves))
    return columns.schema.with_metadata({_FEATURES: features, _HALVES: halves})


def _unpacked(schema: pa.Schema) -> JsonColumns:
    """Convert a cached schema into columns."""
    features = Features.from_dict(json.loads(schema.metadata[_FEATURES]))
    halves = schema.metadata[_HALVES] == b"1"
    return JsonColumns(features, schema.remove_metadata(), halves)


def _chunks(file: Path) -> Iterator[list[str]]:
    """Yield the texts of a file's rows without blank lines, a list for each chunk."""
    with open_bytes(file) as data:
        while chunk := data.read(_CHUNK):
            lines = (chunk + data.readline()).decode("utf-8-sig").split("\n")
            if texts := [line for line in lines if line and not line.isspace()]:
                yield texts


def _whole(value: Any) -> Any:
    """Return the value with its lone UTF-16 surrogates escaped, because Arrow cannot store them."""
    if isinstance(value, str):
        return value.encode("utf-8", "backslashreplace").decode()
    if isinstance(value, dict):
        return {key: _whole(item) for key, item in value.items()}
    return list(map(_whole, value)) if isinstance(value, list) else value
