"""Reads Parquet and Arrow files whose columns may differ in type, without changing any value.

`ArrowFiles.of` finds the common columns, and `ArrowFiles.tables` yields the rows. `local_files.py`
uses it. A column that is int32 in one file and int64 in another becomes int64; one that is int64
and string becomes JSON, with values such as `1` and `"a"`.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
from datasets import Features, Value
from datasets.features import Json, LargeList, List
from datasets.table import table_cast

from batchgen.engine.constraint.json_schema.json_text import first_repeated
from batchgen.inputs.tables.json_values import has_json, json_encoder, storage_type
from batchgen.inputs.tables.table_formats import check_width
from batchgen.util.errors import ConfigError
from batchgen.util.text.row_json import value_reader

_ROWS, _BYTES = 10_000, 1 << 24
"""The maximum number of rows of a table; for Parquet also the approximate maximum number of
bytes."""
_EXACT = ("bool", "string", "large_string", "float16", "float32", "float64")
"""The types besides integers whose values JSON represents exactly."""
_UNITS = ("s", "ms", "us", "ns")
"""The units of timestamps, the finest last."""
_INTEGERS = ("int8", "int16", "int32", "int64", "uint8", "uint16", "uint32", "uint64")


@dataclass(frozen=True)
class ArrowFiles:
    """Files of one format, and the columns that hold the rows of all of them.

    Attributes:
        features: the types of the columns, as datasets describes them. A column is JSON if the
            files' types have no common type that holds all values unchanged.
        is_mixed: whether there is such a column.
    """

    files: Sequence[Path]
    features: Features
    is_mixed: bool

    @classmethod
    def of(cls, files: Sequence[Path]) -> ArrowFiles:
        """Find the common columns of files. Raises ConfigError for a type that rows cannot have, or
        if no type holds the values of a column in all files unchanged."""
        file_features = [_features(file, _schema(file)) for file in files]
        names = dict.fromkeys(name for features in file_features for name in features)
        columns = {
            name: _common(name, list(zip(files, file_features, strict=True))) for name in names
        }
        with_json = {
            name for features in file_features for name, kind in features.items() if has_json(kind)
        }
        # Columns that have JSON in no file, and need it because the files' types differ.
        mixed = [name for name, kind in columns.items() if name not in with_json and has_json(kind)]
        # The whole column becomes JSON, because Arrow makes no empty struct with JSON in it.
        return cls(files, Features(columns | dict.fromkeys(mixed, Json())), bool(mixed))

    def tables(self) -> Iterator[pa.Table]:
        """Yield the rows of all files, as tables of the `features`; at least one table."""
        yield self.features.arrow_schema.empty_table()  # says the columns if no file has rows
        for file in self.files:
            features = _features(file, _schema(file))
            for batch in _batches(file):
                yield self._as_all(pa.Table.from_batches([batch]), features)

    def _as_all(self, table: pa.Table, file_features: Features) -> pa.Table:
        """Convert a table from the features of its file to those of all files."""
        kinds, columns = self.features.arrow_schema, {}
        for name, feature in self.features.items():
            if name not in file_features:
                columns[name] = pa.nulls(len(table), kinds.field(name).type)
            elif file_features[name] != feature and has_json(feature):
                columns[name] = _as_json(table[name], file_features, name, feature)
            else:
                columns[name] = _plain(table[name])
        return table_cast(pa.table(columns), kinds)


def _schema(file: Path) -> pa.Schema:
    """Return the schema of a Parquet or Arrow file."""
    if file.suffix == ".parquet":
        return pq.read_schema(file)
    with pa.memory_map(str(file)) as data, _opened(data) as reader:
        return reader.schema


def _batches(file: Path) -> Iterator[pa.RecordBatch]:
    """Yield the rows of a file in batches of limited size."""
    if file.suffix == ".parquet":
        with pq.ParquetFile(file) as rows:
            groups = map(rows.metadata.row_group, range(rows.num_row_groups))
            row_bytes = max((g.total_byte_size / max(g.num_rows, 1) for g in groups), default=1)
            yield from rows.iter_batches(int(min(max(_BYTES / max(row_bytes, 1), 1), _ROWS)))
        return
    with pa.memory_map(str(file)) as data, _opened(data) as reader:
        if isinstance(reader, pa.ipc.RecordBatchFileReader):
            yield from map(reader.get_batch, range(reader.num_record_batches))
        else:
            yield from reader


def _opened(data: pa.NativeFile) -> pa.ipc.RecordBatchFileReader | pa.ipc.RecordBatchStreamReader:
    """Open data in Arrow's file format, or else in its stream format."""
    try:
        return pa.ipc.open_file(data)
    except pa.ArrowInvalid:
        data.seek(0)
        return pa.ipc.open_stream(data)


def _features(file: Path, schema: pa.Schema) -> Features:
    """Return the features of a file's columns. Types whose values are equal in Python become one
    type.

    Raises:
        ConfigError: two columns have one name, there are too many columns, or rows cannot have a
            type.
    """
    fields = []
    if (twice := first_repeated(schema.names)) is not None:
        raise ConfigError(f"dataset.path: {file} has two columns {twice!r}: rename one of them")
    check_width(len(schema), file)
    for field in schema:
        kind = field.type
        if isinstance(kind, pa.BaseExtensionType) and kind.extension_name == "arrow.json":
            fields.append(field)
        else:
            fields.append(field.with_type(storage_type(kind)))
        try:
            Features.from_arrow_schema(pa.schema(fields[-1:]))
        except ValueError:
            raise ConfigError(
                f"dataset.path: {file}: column {field.name!r} has the type {kind}, which rows "
                "cannot have: write it as text, or leave it out of the file"
            ) from None
    return Features.from_arrow_schema(pa.schema(fields, schema.metadata))


def _common(name: str, files: Sequence[tuple[Path, Features]]) -> Any:
    """Return a feature that holds the values of a column in all files, given with their features.
    Raises ConfigError if there is none."""
    common: Any = Value("null")
    for file, features in files:
        if name not in features:
            continue
        try:
            common = _both(common, features[name])
        except _NoCommonType:
            raise ConfigError(
                f"dataset.path: {file}: column {name!r} has the type "
                f"{_arrow_type(features[name])}, and {_arrow_type(common)} in other files, and no "
                "type holds the values of both unchanged: write all files with one type, such as "
                "text"
            ) from None
    return common


class _NoCommonType(Exception):
    """No feature holds the values of two features unchanged."""


def _both(one: Any, other: Any) -> Any:
    """Return a feature that holds the values of two features unchanged. JSON if it represents the
    values of both exactly, and no other does. Raises _NoCommonType if there is none."""
    if one == other or _is_null(other):
        return one
    if _is_null(one):
        return other
    if isinstance(one, dict) and isinstance(other, dict):
        inner = {name: kind for name, kind in other.items() if name not in one}
        return {n: _both(kind, other[n]) if n in other else kind for n, kind in one.items()} | inner
    if isinstance(one, (List, LargeList)) and isinstance(other, (List, LargeList)):
        return List(_both(one.feature, other.feature))
    if isinstance(one, Value) and isinstance(other, Value):
        kinds = (one.dtype, other.dtype)
        if any(all(text in kind for kind in kinds) for text in ("string", "binary")):
            return one
        if all(kind in _INTEGERS for kind in kinds) and "uint64" not in kinds:
            return Value("int64")
        if all("float" in kind for kind in kinds):
            return Value("float64")
    if _is_json(one) and _is_json(other):
        return Json()
    types = _arrow_type(one), _arrow_type(other)
    if types[0] == types[1]:  # such as class labels and integers
        return one
    wider = _wider(*types)
    if wider is None:
        raise _NoCommonType
    return Features.from_arrow_schema(pa.schema([("", wider)]))[""]


def _wider(one: pa.DataType, other: pa.DataType) -> pa.DataType | None:
    """Return the type of dates, times or decimals that holds the values of two types unchanged;
    None if there is none."""
    if pa.types.is_date(one) and pa.types.is_date(other):
        return pa.date32()
    if pa.types.is_timestamp(one) and pa.types.is_timestamp(other) and one.tz == other.tz:
        return max(one, other, key=lambda kind: _UNITS.index(kind.unit))
    if pa.types.is_decimal(one) and pa.types.is_decimal(other) and one.scale == other.scale:
        return max(one, other, key=lambda kind: kind.precision)
    return None


def _arrow_type(feature: Any) -> pa.DataType:
    return Features({"": feature}).arrow_schema.field("").type


def _is_null(feature: Any) -> bool:
    return isinstance(feature, Value) and feature.dtype == "null"


def _is_json(feature: Any) -> bool:
    """Return whether JSON represents all values of a feature exactly."""
    if isinstance(feature, dict):
        return all(map(_is_json, feature.values()))
    if isinstance(feature, (List, LargeList)):
        return _is_json(feature.feature)
    if isinstance(feature, Value):
        return feature.dtype in (*_EXACT, *_INTEGERS, "null")
    return isinstance(feature, Json)


def _as_json(column: pa.ChunkedArray, file_features: Features, name: str, feature: Any) -> pa.Array:
    """Convert a column to a feature that contains JSON."""
    values = column.to_pylist()
    if read := value_reader(file_features.to_dict()[name]):
        values = list(map(read, values))
    stored = storage_type(Features({name: feature}).arrow_schema.field(name).type)
    if encode := json_encoder(feature, stored):
        values = list(map(encode, values))
    return pa.array(values, stored)


def _plain(column: pa.ChunkedArray) -> pa.ChunkedArray | pa.Array:
    """Convert a column to the type of `storage_type`, unless it is JSON."""
    kind = column.type
    if isinstance(kind, pa.BaseExtensionType):
        if kind.extension_name == "arrow.json":
            return column
        if kind.extension_name == "arrow.uuid":
            return pa.array([None if v is None else str(v) for v in column.to_pylist()])
    plain = storage_type(kind)
    if plain == kind:  # a cast to the same type may cut nulls in lists of structs
        return column
    if pa.types.is_string_view(kind) or pa.types.is_dictionary(kind):
        return column.cast(plain)
    return pa.array(column.to_pylist(), plain)  # Arrow cannot cast all of them
