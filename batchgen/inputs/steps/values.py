"""Reads the columns of rows for row steps, and makes keys of them: equal values have equal keys."""

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
    """Return the names of columns as a tuple, from one name or several."""
    return (names,) if isinstance(names, str) else tuple(names)


def field_of(fields: Mapping[str, Any], name: str) -> Any:
    """Return the value of a column, or of a field inside a struct, whose name has dots. None if it
    does not exist."""
    if name in fields or "." not in name:
        return fields.get(name)
    # "a.b.c" is the field c of the column "a.b" if there is one, or else the field b.c of "a".
    parts = name.split(".")
    for end in range(len(parts) - 1, 0, -1):
        if ".".join(parts[:end]) in fields:
            return value_at(fields, (".".join(parts[:end]), *parts[end:]))
    return None


def feature_of(features: Mapping[str, Any], name: str) -> Any:
    """Return the feature of a column, or of a field inside a struct, which must exist."""
    path = column_path(name, features)
    assert path is not None
    return feature_at(features[path[0]], path[1:])


def required_value(fields: Mapping[str, Any], name: str) -> Any:
    """Return the value of a column. Raises BadRow if it is null."""
    value = field_of(fields, name)
    if value is None:
        raise BadRow(f"the row has no value in column {name!r}")
    return value


def key_text(fields: Mapping[str, Any], names: Sequence[str]) -> str:
    """Return the values of some columns as one text, which differs if a value or its type differs:
    `sabc` for the one text "abc", `j[1, "abc"]` for other values. Raises BadRow if one is null."""
    if len(names) == 1 and isinstance(value := required_value(fields, names[0]), str):
        return f"s{value}"
    values = [required_value(fields, name) for name in names]
    return "j" + json.dumps(values, sort_keys=True, ensure_ascii=False, default=str)


def digest(text: str) -> bytes:
    """Return a digest of 16 bytes of a text."""
    return blake2b(text.encode("utf-8", "surrogatepass"), digest_size=16).digest()


def hashed_number(*parts: object) -> int:
    """Return a 64-bit hash of the parts, the same in every process."""
    text = "\0".join(map(str, parts))
    return int(xxh64_intdigest(text.encode("utf-8", "surrogatepass")))


def value_repr(value: Any) -> str:
    """Return the text of a value for a message, at most 60 characters."""
    text = value if isinstance(value, str) else json.dumps(value, ensure_ascii=False, default=str)
    return beginning(text, 60)
