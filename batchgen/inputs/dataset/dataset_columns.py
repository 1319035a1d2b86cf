"""Finds values inside nested columns, which users name with dots: `body.messages`."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

from batchgen.engine.constraint.json_schema.json_text import parse_unique_json
from batchgen.util.errors import ConfigError
from batchgen.util.shorten import some_names


def column_path(name: str, features: Mapping[str, Any]) -> tuple[str, ...] | None:
    """The keys that lead from a row to the value that a dotted name means: the name of the column,
    then the keys inside its structs; None if there is no such column.

    A column that has dots in its own name goes before what lies inside another one.
    """
    parts = name.split(".")
    for end in range(len(parts), 0, -1):
        column, keys = ".".join(parts[:end]), parts[end:]
        if column in features and (not keys or feature_at(features[column], keys) is not None):
            return (column, *keys)
    return None


def named_path(key: str, name: str, features: Mapping[str, Any]) -> tuple[str, ...]:
    """The path of the column that a key of the configuration names. Raises ConfigError if there is
    none."""
    path = column_path(name, features)
    if path is None:
        raise ConfigError(
            f"{key}: the data set has no column {name!r}: choose among {some_names(features, name)}"
        )
    return path


def feature_at(feature: Any, keys: list[str] | tuple[str, ...]) -> Any:
    """The feature below some keys of a feature; None if there cannot be one. Below JSON of several
    types it is JSON."""
    if not keys:
        return feature
    from datasets.features import Json  # takes seconds, and mistakes are told before it is needed

    for key in keys:
        if isinstance(feature, Json):
            return feature
        feature = feature.get(key) if isinstance(feature, dict) else None
    return feature


def value_at(fields: Mapping[str, Any], path: tuple[str, ...]) -> Any:
    """The value at a path from `column_path`; None if it or a struct above it is absent."""
    value: Any = fields
    for key in path:
        value = value.get(key) if isinstance(value, Mapping) else None
    return value


def json_cell(value: Any) -> Any:
    """The JSON value of a cell; text is parsed.

    Raises:
        ValueError: the cell holds text that is no JSON, or names a key twice.
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
    """The new name of each column, as `dataset.rename` says. Raises ConfigError if it names no
    column, or gives two columns one name."""
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
