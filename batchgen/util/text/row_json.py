"""Writes rows of a job as JSON, and restores values of the data set from their Arrow form."""

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
    """The JSON of a value from a job's rows, in one line.

    NaN and infinity become null, dates and times are as in ISO 8601, bytes in base64, and other
    values that JSON does not have are texts.
    """
    try:
        return json.dumps(value, ensure_ascii=False, allow_nan=False, default=_plain)
    except ValueError:
        return json.dumps(_finite(value), ensure_ascii=False, allow_nan=False, default=_plain)


def plain_text(value: Any) -> str:
    """The JSON of a value; a string (also a date) is without quotes."""
    text = json_text(value)
    return str(json.loads(text)) if text.startswith('"') else text


def json_readers(schema: Iterable[pa.Field]) -> dict[str, Callable[[Any], Any]]:
    """Functions that restore values of the data set from those that Arrow keeps, by column: JSON
    that is kept as text is parsed, and the fields that Arrow adds to structs, because other rows
    have them, are left out. Columns whose values Arrow keeps as they are have none; the metadata of
    fields say which these are."""
    readers: dict[str, Callable[[Any], Any]] = {}
    for field in schema:
        metadata = field.metadata or {}
        if described := metadata.get(b"feature"):
            (feature,) = json.loads(described).values()  # by the name that the column had then
            reader = value_reader(feature)
        else:
            reader = _without_padding if metadata.get(b"meaning") == AS_GIVEN else None
            reader = reader if _has_struct(field.type) else None
        if reader is not None:
            readers[field.name] = reader
    return readers


def row_reader(schema: Iterable[pa.Field]) -> Callable[[Mapping[str, Any]], dict[str, Any]]:
    """A function that restores the values of the data set in a row, or in a part of one."""
    readers = json_readers(schema)
    if not readers:
        return dict
    return lambda row: {n: r(v) if (r := readers.get(n)) else v for n, v in row.items()}


def value_reader(feature: Any) -> Callable[[Any], Any] | None:
    """A function that restores a value of the data set from what Arrow keeps; None if both are
    equal.

    `feature` is the type as the library `datasets` writes it: a mapping with `_type`, or a mapping
    or a list of such.
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
    """A struct without the fields that are null: Arrow has those of all rows in each of them."""
    return {
        name: item if (read := readers[name]) is None else read(item)
        for name, item in value.items()
        if item is not None
    }


def _parsed(value: Any) -> Any:
    if isinstance(value, str):
        return json.loads(value)
    # A column of numbers, of which the whole ones were integers.
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
