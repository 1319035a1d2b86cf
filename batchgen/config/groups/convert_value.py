"""Converts plain values from YAML or the command line to the types that dataclasses declare.
`load_config.py` builds the groups with it, and `named_code.py` the options of classes."""

from __future__ import annotations

import dataclasses
import inspect
import os
import types
from collections import abc
from collections.abc import Mapping
from typing import Annotated, Any, Literal, TypeVar, Union, get_args, get_origin, get_type_hints

from batchgen.util.errors import ConfigError

T = TypeVar("T")

MISSING = "???"
"""The value in a configuration file that the user must replace; OmegaConf has the same mark."""

# Type → its name in messages.
_SCALARS = {
    int: "an integer",
    float: "a number",
    bool: "true or false",
    str: "a string",
    type(None): "null",
}
_LISTS = (list, abc.Sequence, abc.Collection, abc.Iterable)
_MAPPINGS = (dict, abc.Mapping)


class UnsupportedType(Exception):
    """A value has a declared type that this module cannot convert to."""


def build(cls: type[T], values: Mapping[str, Any], prefix: str) -> T:
    """Make an instance of a dataclass whose fields are the keys of the group `prefix`.

    Raises:
        ConfigError: a key is unknown or missing, or its value has another type than the field.
    """
    assert dataclasses.is_dataclass(cls)
    hints = get_type_hints(cls)  # also of class variables, which are no fields
    fields = {key_of(field.name): field for field in dataclasses.fields(cls) if field.init}
    required = [
        key
        for key, field in fields.items()
        if field.default is dataclasses.MISSING and field.default_factory is dataclasses.MISSING
    ]
    check_keys(values, allowed=list(fields), required=required, prefix=f"{prefix}.")
    names = {key: fields[key].name for key in values}
    return cls(
        **{
            name: convert(values[key], hints[name], f"{prefix}.{key}")
            for key, name in names.items()
        }
    )


def key_of(field: str) -> str:
    """The key that users write for a field. A field whose name is a word of Python ends with _."""
    return field.removesuffix("_")


def check_keys(
    values: Mapping[Any, Any], *, allowed: list[str], required: list[str], prefix: str
) -> None:
    """Check the keys of a group or class.

    Raises:
        ConfigError: a key is not among `allowed`, has no value yet, or is required and missing.
    """
    for key, value in values.items():
        if key not in allowed:
            choice = f"choose among {', '.join(allowed)}" if allowed else "there are none"
            raise ConfigError(f"{prefix}{key} is not a key: {choice}")
        if value == MISSING:
            raise ConfigError(f"{prefix}{key} has no value: set it with {prefix}{key}=…")
    for key in required:
        if key not in values:
            raise ConfigError(f"{prefix}{key} is missing: set it with {prefix}{key}=…")


def convert(value: Any, hint: Any, key: str) -> Any:
    """Convert a plain value to the declared type `hint` of a key.

    An integer is also a number, a list is also a tuple, and a single text or number is also a list.
    No other conversion happens: the text "3" is not an integer, and true is neither an integer nor
    a string. A value without a declared type (`inspect.Parameter.empty`) is returned as it is.

    Raises:
        ConfigError: the value does not fit.
        UnsupportedType: the type is not None, bool, int, float, str, Any, Literal, a dataclass (a
            group of keys), a union, or a list, tuple or mapping of these.
    """
    if hint is Any or hint is object or hint is inspect.Parameter.empty:
        return value
    if hint is None:
        hint = type(None)
    if any(hint is scalar for scalar in _SCALARS):
        return _scalar(value, hint, key)
    origin, args = get_origin(hint) or hint, get_args(hint)
    if origin is Annotated:
        return convert(value, args[0], key)
    if origin is Union or origin is types.UnionType:
        return _union(value, args, key)
    if origin is Literal:
        if not any(value == choice and type(value) is type(choice) for choice in args):
            raise ConfigError(f"{key} must be one of {', '.join(map(str, args))}, got {value!r}")
        return value
    if origin is tuple:
        return _tuple(value, args, key)
    if isinstance(origin, type) and dataclasses.is_dataclass(origin):
        return build(origin, _mapping(value, str, Any, key), key)
    if any(origin is kind for kind in _LISTS) and len(args) <= 1:
        return _list(value, args[0] if args else Any, key)
    if any(origin is kind for kind in _MAPPINGS) and len(args) in (0, 2):
        names, items = args or (str, Any)
        return _mapping(value, names, items, key)
    raise UnsupportedType


def _scalar(value: Any, hint: type, key: str) -> Any:
    """The value as a text, number, boolean or null, see `convert`."""
    if hint is str and not isinstance(value, str):
        # A user who typed [A-D] without quotes gave a list, not text.
        typed = "…" if isinstance(value, (list, dict)) else value
        hint_text = "" if value is None else f": to give it as text, quote it as '\"{typed}\"'"
        raise ConfigError(f"{key} must be a string, got {value!r}{hint_text}")
    fits = isinstance(value, (int, float) if hint is float else hint)
    if not fits or (isinstance(value, bool) and hint is not bool):
        raise ConfigError(f"{key} must be {_SCALARS[hint]}, got {value!r}")
    if hint is not float:
        return value
    try:
        return float(value)
    except OverflowError:
        raise ConfigError(f"{key} must be a number of at most 1.8e308, got a larger one") from None


def _union(value: Any, hints: tuple[Any, ...], key: str) -> Any:
    """The value as the first of several types that it fits; its present type is tried first."""
    if value is None and type(None) in hints:
        return None
    hints = tuple(hint for hint in hints if hint is not type(None))
    errors: list[str] = []
    unknown = False
    for hint in sorted(hints, key=lambda hint: hint is not type(value)):
        try:
            return convert(value, hint, key)
        except ConfigError as error:
            errors.append(str(error))
        except UnsupportedType:
            unknown = True
    if unknown:  # the value may be meant for the unsupported type
        raise UnsupportedType
    if str in hints and not isinstance(value, (list, dict)):  # one text, or a list of texts
        convert(value, str, key)  # raises the error of a text, which says to quote it
    if len(errors) == 1:
        raise ConfigError(errors[0])
    names = " or ".join(map(inspect.formatannotation, hints))
    raise ConfigError(f"{key} must be {names}, got {value!r}")


def _tuple(value: Any, hints: tuple[Any, ...], key: str) -> tuple[Any, ...]:
    """The value as a tuple of one type and any length, or of one type for each item."""
    if not hints:
        return tuple(_list(value, Any, key))
    if len(hints) == 2 and hints[1] is Ellipsis:  # tuple[int, ...] has any length
        return tuple(_list(value, hints[0], key))
    items = _list(value, Any, key)
    if len(items) != len(hints):
        raise ConfigError(f"{key} must be a list of {len(hints)} values, got {value!r}")
    pairs = enumerate(zip(items, hints, strict=True))
    return tuple(convert(item, hint, f"{key}[{i}]") for i, (item, hint) in pairs)


def _list(value: Any, hint: Any, key: str) -> list[Any]:
    """The value as a list of one type; a single text or number is a list of one item."""
    if isinstance(value, (str, int, float)) and not isinstance(value, bool):
        value = [value]
    if not isinstance(value, list):
        raise ConfigError(f"{key} must be a list such as [a,b], got {value!r}")
    return [convert(item, hint, f"{key}[{i}]") for i, item in enumerate(value)]


def _mapping(value: Any, names: Any, items: Any, key: str) -> dict[Any, Any]:
    """The value as a mapping, with the types of its names and of its items."""
    if not isinstance(value, dict) or (
        names is str and not all(isinstance(name, str) for name in value)
    ):
        raise ConfigError(f"{key} must be a mapping of names to values, got {value!r}")
    return {
        convert(name, names, f"{key}: the name {name!r}"): convert(item, items, f"{key}.{name}")
        for name, item in value.items()
    }


def check(ok: bool, key: str, allowed: str, value: object) -> None:
    """Raise ConfigError, which says what is `allowed`, unless the value is `ok`."""
    if not ok:
        raise ConfigError(f"{key} must be {allowed}, got {value!r}")


def plain_value(value: Any) -> Any:
    """A value as YAML and JSON can have it: tuples become lists, and paths texts."""
    if isinstance(value, Mapping):
        return {key: plain_value(item) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [plain_value(item) for item in value]
    return os.fspath(value) if isinstance(value, os.PathLike) else value
