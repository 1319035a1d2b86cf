"""Reads JSON lines as the texts of their rows, and finds types for columns that hold all rows'
values."""

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
"""The column with the text of each row."""
_CHUNK = 1 << 20
"""About how many bytes become a table."""
_HALF_PAIR = re.compile(
    r"\\u[dD][89abAB]..(?!\\u[dD][c-fC-F])|(?<!\\u[dD][89abAB]..)\\u[dD][c-fC-F]"
)
_FEATURES, _HALVES = b"features", b"halves"


@dataclass(frozen=True)
class JsonColumns:
    """The columns that hold all rows of JSON lines.

    Attributes:
        features: what they hold in the terms of datasets: JSON where values have several types.
        schema: the Arrow types that keep them.
        has_halves: whether a text may hold half of a UTF-16 pair, which Arrow cannot keep.
    """

    features: Features
    schema: pa.Schema
    has_halves: bool

    def table(self, texts: Sequence[str]) -> pa.Table:
        """The rows of some texts as a table of the `features`, in which JSON is text."""
        kinds = self.features.arrow_schema
        if not self.has_halves and not any(map(has_json, self.features.values())):
            lines = "\n".join(texts).encode()
            size = len(lines) + 1  # one block: a row must not lie in two of them
            return pyarrow.json.read_json(  # several times as fast
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
    """The rows of files of JSON lines as tables of their texts."""
    for file in files:
        for texts in _chunks(file):
            yield pa.table({ROW_TEXT: pa.array(texts, pa.string())})


def parse_rows(texts: Sequence[str]) -> list[dict[str, Any]]:
    """Parse rows from the texts that `json_tables` yields, after `json_columns` has checked
    them."""
    with _without_collections():
        rows: list[dict[str, Any]] = json.loads(f"[{','.join(texts)}]")
    return rows


def json_columns(files: Sequence[Path], cache: Path) -> JsonColumns:
    """Find the columns of all rows in one pass over the files. The result is kept in the folder
    `cache`, which belongs to exactly these files.

    Raises:
        ValueError, RecursionError: a row is no JSON object, or has a key twice.
        ConfigError: there are more columns than can be read.
    """
    kept = cache / "columns.arrow"
    try:
        return _unpacked(pa.ipc.read_schema(pa.py_buffer(kept.read_bytes())))
    except (OSError, pa.ArrowException):
        columns = _seen_columns(files)
    with suppress(OSError):  # rows can be read without a cache
        cache.mkdir(parents=True, exist_ok=True)
        part = temporary_name(kept)
        part.write_bytes(_packed(columns).serialize().to_pybytes())
        part.replace(kept)
    return columns


def _seen_columns(files: Sequence[Path]) -> JsonColumns:
    seen, has_halves = SeenValues(), False
    for file in files:
        for texts in _chunks(file):
            seen.add_fields(_checked_rows(texts))
            check_width(len(seen.fields), file)
            if not has_halves and _has_pair("".join(texts)):
                has_halves = any(map(_HALF_PAIR.search, texts))
    features = Features({name: field.feature() for name, field in seen.fields.items()})
    schema = pa.schema([(name, field.stored()) for name, field in seen.fields.items()])
    return JsonColumns(features, schema, has_halves)


@contextmanager
def _without_collections() -> Iterator[None]:
    """Parse without Python's search for unreachable objects, of which JSON makes none: that takes a
    third of the time."""
    was_enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_enabled:
            gc.enable()


def _checked_rows(texts: Sequence[str]) -> list[dict[str, Any]]:
    """The rows of which each text alone is one. Raises ValueError if a text is none.

    They are parsed at once, which takes half the time, and between them stands what no file can
    have, so that no two texts are taken for one row.
    """
    mark = secrets.token_hex(16)
    between = f',"{mark}",'
    with _without_collections():
        parsed = json.loads(f"[{between.join(texts)}]", object_pairs_hook=unique_members)
    rows: list[dict[str, Any]] = parsed[::2]
    if parsed[1::2] != [mark] * (len(texts) - 1) or set(map(type, rows)) != {dict}:
        raise ValueError("each line must hold one JSON object")
    return rows


def _has_pair(text: str) -> bool:
    return "\\ud" in text or "\\uD" in text


def _packed(columns: JsonColumns) -> pa.Schema:
    features = json.dumps(columns.features.to_dict())
    halves = str(int(columns.has_halves))
    return columns.schema.with_metadata({_FEATURES: features, _HALVES: halves})


def _unpacked(schema: pa.Schema) -> JsonColumns:
    features = Features.from_dict(json.loads(schema.metadata[_FEATURES]))
    halves = schema.metadata[_HALVES] == b"1"
    return JsonColumns(features, schema.remove_metadata(), halves)


def _chunks(file: Path) -> Iterator[list[str]]:
    """The texts of a file's rows, without blank lines, many at a time."""
    with open_bytes(file) as data:
        while chunk := data.read(_CHUNK):
            lines = (chunk + data.readline()).decode("utf-8-sig").split("\n")
            if texts := [line for line in lines if line and not line.isspace()]:
                yield texts


def _whole(value: Any) -> Any:
    """The value with its halves of UTF-16 pairs spelled out, which Arrow cannot hold."""
    if isinstance(value, str):
        return value.encode("utf-8", "backslashreplace").decode()
    if isinstance(value, dict):
        return {key: _whole(item) for key, item in value.items()}
    return list(map(_whole, value)) if isinstance(value, list) else value
