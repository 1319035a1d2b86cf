"""Reads values of rows, and turns them into keys: equal values give equal texts, whatever their
type."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from hashlib import blake2b
from typing import Any

from xxhash import xxh64_intdigest

from batchgen.inputs.dataset.dataset_columns import column_path, feature_at, value_at
from batchgen.inputs.steps.table_step import BadRow
from batchgen.util.shorten import beginning


def columns_of(names: str | Sequence[str]) -> tuple[str, ...]:
    """Names of columns, of which there may be one alone."""
    return (names,) if isinstance(names, str) else tuple(names)


def field_of(fields: Mapping[str, Any], name: str) -> Any:
    """The value of a column, or of one inside a struct, whose name has dots; None if it is not
    there."""
    if name in fields or "." not in name:
        return fields.get(name)
    parts = name.split(".")
    for end in range(len(parts) - 1, 0, -1):
        if ".".join(parts[:end]) in fields:
            return value_at(fields, (".".join(parts[:end]), *parts[end:]))
    return None


def feature_of(features: Mapping[str, Any], name: str) -> Any:
    """The feature of such a column, which is there."""
    path = column_path(name, features)
    assert path is not None
    return feature_at(features[path[0]], path[1:])


def required_value(fields: Mapping[str, Any], name: str) -> Any:
    """The value of a column; BadRow if it is null."""
    value = field_of(fields, name)
    if value is None:
        raise BadRow(f"the row has no value in column {name!r}")
    return value


def key_text(fields: Mapping[str, Any], names: Sequence[str]) -> str:
    """The values of some columns as one text, which differs where a value or its type does; BadRow
    if one is null."""
    if len(names) == 1 and isinstance(value := required_value(fields, names[0]), str):
        return f"s{value}"
    values = [required_value(fields, name) for name in names]
    return "j" + json.dumps(values, sort_keys=True, ensure_ascii=False, default=str)


def digest(text: str) -> bytes:
    """16 bytes that stand for a text."""
    return blake2b(text.encode("utf-8", "surrogatepass"), digest_size=16).digest()


def hashed_number(*parts: object) -> int:
    """A number of 64 bits that follows from the parts alone."""
    text = "\0".join(map(str, parts))
    return int(xxh64_intdigest(text.encode("utf-8", "surrogatepass")))


def value_repr(value: Any) -> str:
    """A value in a message."""
    text = value if isinstance(value, str) else json.dumps(value, ensure_ascii=False, default=str)
    return beginning(text, 60)
