"""JSON text as its standard (RFC 8259) defines it. Python's `json` reads and writes more than that:
NaN and Infinity, numbers that become infinite, and objects in which one name stands twice.
"""

import json
import math
from collections import abc
from typing import Any, NoReturn

from batchgen.engine.base.constraint_error import ConstraintError

WHITESPACE = " \t\n\r"
"""The characters that JSON allows between its tokens; there are no others."""


class NotJson(ValueError):
    """A text that is not JSON. The message says why."""


def parse_json(text: str) -> Any:
    """The value that a JSON text stands for.

    Raises:
        NotJson: the text is not JSON. That includes NaN and Infinity, which Python would read.
        ValueError: a number in it has more digits than Python reads (4300).
        RecursionError: its arrays and objects are nested too deeply for Python.
    """
    try:
        return json.loads(text, parse_constant=_refuse_constant)
    except json.JSONDecodeError as error:
        raise NotJson(str(error)) from None


def parse_unique_json(text: str) -> Any:
    """The value of a JSON text that a person wrote. It is read as by `parse_json`, and more
    strictly: an object that has one name twice is refused, because most readers would silently drop
    one of its two values, and so is a number that is too large for a float.

    Raises:
        NotJson, ValueError, RecursionError: as `parse_json`.
    """
    try:
        return json.loads(
            text,
            parse_constant=_refuse_constant,
            parse_float=_finite,
            object_pairs_hook=_unique,
        )
    except json.JSONDecodeError as error:
        raise NotJson(str(error)) from None


def read_object(value: Any, what: str) -> Any:
    """The JSON object that a user gave, as a mapping or as JSON text. A boolean is returned as it
    is, because `true` and `false` are JSON Schemas.

    Args:
        value: what the user gave. A mapping may be of any class (Hydra has its own).
        what: names the value in error messages.

    Raises:
        ConstraintError: the value is neither, or is not JSON.
    """
    if not isinstance(value, str | bool | abc.Mapping):
        raise ConstraintError(f"{what} must be a mapping or its JSON text, got {value!r:.100}")
    try:
        # A mapping is written and read again, because it may hold what JSON cannot.
        text = value if isinstance(value, str) else json.dumps(value, default=_plain)
        parsed = parse_unique_json(text)
    except RecursionError:
        raise ConstraintError(f"{what} is nested too deeply") from None
    except (TypeError, ValueError) as error:
        raise ConstraintError(f"{what} is not JSON: {error}") from None
    if not isinstance(parsed, dict | bool):
        raise ConstraintError(f"{what} must be a JSON object, got {parsed!r:.100}")
    return parsed


def compact_json(value: Any) -> str:
    """The JSON text of a value without any whitespace. Object members keep their order.

    Raises:
        TypeError, ValueError: the value has a part that JSON cannot hold.
    """
    return json.dumps(value, ensure_ascii=False, separators=(",", ":"), allow_nan=False)


def first_repeated(texts: abc.Iterable[str]) -> str | None:
    """The first text that was there before; None if all differ."""
    seen: set[str] = set()
    for text in texts:
        if text in seen:
            return text
        seen.add(text)
    return None


def equality_key(value: Any) -> abc.Hashable:
    """A key that two JSON values share if and only if they are equal. In Python true equals 1, in
    JSON it does not; 1 equals 1.0 in both."""
    if isinstance(value, dict):
        return "object", frozenset((name, equality_key(item)) for name, item in value.items())
    if isinstance(value, list):
        return "array", tuple(map(equality_key, value))
    return isinstance(value, bool), value


def has_lone_surrogate(text: str) -> bool:
    """Whether a Python string holds a code point from U+D800 to U+DFFF. Such a code point is half
    of a UTF-16 pair and no character, so UTF-8 cannot encode it.
    """
    return any("\ud800" <= char <= "\udfff" for char in text)


def _plain(value: Any) -> Any:
    """A mapping or sequence of another library as the dict or list that `json` writes."""
    if isinstance(value, abc.Mapping):
        return dict(value)
    if isinstance(value, abc.Sequence):
        return list(value)
    raise TypeError(f"{type(value).__name__} is not a JSON value")


def _finite(digits: str) -> float:
    if math.isinf(value := float(digits)):
        raise NotJson(f"the number {digits:.40} is too large")
    return value


def _refuse_constant(name: str) -> NoReturn:
    raise NotJson(f"{name} is not a JSON number")


def _unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    members = dict(pairs)
    if len(members) < len(pairs):
        twice = first_repeated(name for name, _ in pairs)
        raise NotJson(f"the name {twice!r:.100} stands twice in one object")
    return members
