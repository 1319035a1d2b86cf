"""Rows of a job as JSON, one row in a line."""

from __future__ import annotations

import base64
import json
import math
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

import pyarrow as pa


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


def json_readers(schema: pa.Schema) -> dict[str, Callable[[Any], Any]]:
    """For each column that holds JSON as text, a function that reads a value of it back.

    Columns of the data set whose values have no one type are such; the metadata of fields tell.
    """
    readers: dict[str, Callable[[Any], Any]] = {}
    for field in schema:
        if described := (field.metadata or {}).get(b"feature"):
            (feature,) = json.loads(described).values()  # by the name that the column had then
            readers[field.name] = partial(_read_back, feature=feature)
    return readers


def row_reader(schema: pa.Schema) -> Callable[[Mapping[str, Any]], dict[str, Any]]:
    """A function that parses the JSON in the columns of a row, or of a part of it."""
    readers = json_readers(schema)
    if not readers:
        return dict
    return lambda row: {n: r(v) if (r := readers.get(n)) else v for n, v in row.items()}


def _read_back(value: Any, feature: Any) -> Any:
    """The value with its JSON parsed. `feature` is what the library datasets writes for a type: a
    mapping with `_type`, or a mapping or a list of such."""
    if value is None:
        return None
    if isinstance(feature, list):
        return [_read_back(item, feature[0]) for item in value]
    kind = feature.get("_type")
    if kind == "Json":
        return json.loads(value)
    if kind in ("List", "LargeList", "Sequence"):
        return [_read_back(item, feature["feature"]) for item in value]
    if isinstance(kind, str) or not isinstance(value, Mapping):
        return value
    return {key: _read_back(item, feature[key]) for key, item in value.items()}


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
