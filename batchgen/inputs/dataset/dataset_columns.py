"""Finds columns and values inside nested columns, which users name with dots, such as
`body.messages`. Row sources, prompts and constraints use this."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

from batchgen.engine.constraint.json_schema.json_text import parse_unique_json
from batchgen.util.errors import ConfigError
from batchgen.util.shorten import some_names


def column_path(name: str, features: Mapping[str, Any]) -> tuple[str, ...] | None:
    """Return the path of a dotted name: the column, then the keys inside its structs. None if there
    is no such column. `body.messages` has the path ("body", "messages").

    A column whose name contains dots has priority over a value inside another column.

    Args:
        features: the types of the data set's columns.
    """
    parts = name.split(".")
    for end in range(len(parts), 0, -1):
        column, keys = ".".join(parts[:end]), parts[end:]
        if column in features and (not keys or feature_at(features[column], keys) is not None):
            return (column, *keys)
    return None


def named_path(key: str, name: str, features: Mapping[str, Any]) -> tuple[str, ...]:
    """Return the path of the column that the configuration key `key` names. Raises ConfigError if
    there is no such column."""
    path = column_path(name, features)
    if path is None:
        raise ConfigError(
            f"{key}: the data set has no column {name!r}: choose among {some_names(features, name)}"
        )
    return path


def feature_at(feature: Any, keys: list[str] | tuple[str, ...]) -> Any:
    """Return the type (`datasets` feature) of a value inside a struct, given the struct's feature
    and the keys; None if there is no such value. Inside a JSON feature, all values are JSON."""
    if not keys:
        return feature
    from datasets.features import Json  # slow import, not needed to report errors

    for key in keys:
        if isinstance(feature, Json):
            return feature
        feature = feature.get(key) if isinstance(feature, dict) else None
    return feature


def value_at(fields: Mapping[str, Any], path: tuple[str, ...]) -> Any:
    """Return the value at a path from `column_path`; None if the value or a struct on the path is
    missing."""
    value: Any = fields
    for key in path:
        value = value.get(key) if isinstance(value, Mapping) else None
    return value


def json_cell(value: Any) -> Any:
    """Return the JSON value of a cell. Text is parsed; other values are returned as they are.

    Raises:
        ValueError: the text is not JSON, or an object has a key twice.
    """
    if not isinstance(value, str):
        return value
    try:
        return parse_unique_json(value)
    except RecursionError:
        raise ValueError("it is nested too deeply") from None
    except ValueError as error:
        raise ValueError(f"it is not JSON: {error}") from None


def renamed(rename: Mapping[str, str], columns: Iterable[str]) -> dict[str, str]:
    """Map each column to its name after `dataset.rename`.

    Raises:
        ConfigError: `rename` names a column that does not exist, or two columns would have one
            name.
    """
    names = {name: rename.get(name, name) for name in columns}
    for name in rename:
        if name not in names:
            raise ConfigError(
                f"dataset.rename: no column {name!r}: choose among {some_names(names, name)}"
            )
    new_names = list(names.values())
    for name, new in rename.items():
        if new_names.count(new) > 1:
            raise ConfigError(
                f"dataset.rename: {name!r} cannot become {new!r}, which is a column already: "
                "choose another name, or rename that one, too"
            )
    return names
