"""Writes rows of a job as JSON, and restores the data set's values from the form in which Arrow
stores them."""

from __future__ import annotations

import base64
import json
import math
from collections.abc import Callable, Iterable, Mapping
from typing import Any

import pyarrow as pa

AS_GIVEN = b"as in the input"
"""The value of `meaning` in the metadata of an output column that is copied from the data set."""


def json_text(value: Any) -> str:
    """Return the JSON of a value from a job's rows, in one line.

    NaN and infinity become null, dates and times ISO 8601 texts, bytes base64, and other values
    that JSON lacks become texts.
    """
    try:
        return json.dumps(value, ensure_ascii=False, allow_nan=False, default=_plain)
    except ValueError:
        return json.dumps(_finite(value), ensure_ascii=False, allow_nan=False, default=_plain)


def plain_text(value: Any) -> str:
    """Return the JSON of a value; a string or date is without quotes."""
    text = json_text(value)
    return str(json.loads(text)) if text.startswith('"') else text


def json_readers(schema: Iterable[pa.Field]) -> dict[str, Callable[[Any], Any]]:
    """Return, by column, functions that restore the data set's values from those in Arrow.

    Two changes are undone: JSON that is stored as text is parsed, and fields that a struct has only
    because other rows have them are removed. Columns that need neither are left out. The metadata
    of the fields say which columns come from the data set.
    """
    readers: dict[str, Callable[[Any], Any]] = {}
    for field in schema:
        metadata = field.metadata or {}
        if described := metadata.get(b"feature"):
            (feature,) = json.loads(described).values()  # the key is the column's original name
            reader = value_reader(feature)
        else:
            reader = _without_padding if metadata.get(b"meaning") == AS_GIVEN else None
            reader = reader if _has_struct(field.type) else None
        if reader is not None:
            readers[field.name] = reader
    return readers


def row_reader(schema: Iterable[pa.Field]) -> Callable[[Mapping[str, Any]], dict[str, Any]]:
    """Return a function that restores the data set's values in a row, or in some columns of one."""
    readers = json_readers(schema)
    if not readers:
        return dict
    return lambda row: {n: r(v) if (r := readers.get(n)) else v for n, v in row.items()}


def value_reader(feature: Any) -> Callable[[Any], Any] | None:
    """Return a function that restores a value of the data set from its form in Arrow; None if both
    forms are equal.

    Args:
        feature: the type in the notation of the library `datasets`: a mapping with `_type`, or a
            mapping or list of such types.
    """
    if isinstance(feature, list):
        return _list_reader(feature[0])
    kind = feature.get("_type")
    if kind == "Json":
        return _parsed
    if kind in ("List", "LargeList", "Sequence"):
        return _list_reader(feature["feature"])
    if isinstance(kind, str):
        return None
    readers = {name: value_reader(inner) for name, inner in feature.items()}
    return lambda value: None if value is None else _struct(value, readers)


def _list_reader(feature: Any) -> Callable[[Any], Any] | None:
    read = value_reader(feature)
    if read is None:
        return None
    return lambda items: None if items is None else list(map(read, items))


def _struct(
    value: Mapping[str, Any], readers: Mapping[str, Callable[[Any], Any] | None]
) -> dict[str, Any]:
    """Restore a struct: remove its null fields, because Arrow gives each struct the fields of all
    rows."""
    return {
        name: item if (read := readers[name]) is None else read(item)
        for name, item in value.items()
        if item is not None
    }


def _parsed(value: Any) -> Any:
    if isinstance(value, str):
        return json.loads(value)
    # In a column with floats, Arrow stores the integers as floats too.
    return int(value) if isinstance(value, float) and value.is_integer() else value


def _without_padding(value: Any) -> Any:
    if isinstance(value, Mapping):
        return {k: _without_padding(item) for k, item in value.items() if item is not None}
    return list(map(_without_padding, value)) if isinstance(value, list) else value


def _has_struct(kind: pa.DataType) -> bool:
    if pa.types.is_nested(kind):
        fields = [kind.field(index) for index in range(kind.num_fields)]
        return pa.types.is_struct(kind) or any(_has_struct(field.type) for field in fields)
    return False


def _plain(value: Any) -> str:
    if isinstance(value, bytes):
        return base64.b64encode(value).decode()
    return value.isoformat() if hasattr(value, "isoformat") else str(value)


def _finite(value: Any) -> Any:
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    if isinstance(value, Mapping):
        return {key: _finite(item) for key, item in value.items()}
    return [_finite(item) for item in value] if isinstance(value, list) else value
