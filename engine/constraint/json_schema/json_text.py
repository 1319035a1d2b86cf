"""JSON text as defined by its standard (RFC 8259).

Python's `json` reads and writes more: NaN and Infinity, numbers that become infinite, and objects
in which a name occurs twice.
"""

import json
import math
from collections import abc
from typing import Any, NoReturn

from batchgen.engine.interface.constraint_error import ConstraintError

WHITESPACE = " \t\n\r"
"""The characters that JSON allows between its tokens."""


class NotJson(ValueError):
    """A text that is not JSON. The message says why."""


def parse_json(text: str) -> Any:
    """Read a JSON text, without NaN and Infinity.

    Raises NotJson; ValueError for a number with more digits than Python reads (4300);
    RecursionError.
    """
    return _loads(text)


def parse_unique_json(text: str) -> Any:
    """Read a JSON text that a person wrote, more strictly than `parse_json`.

    It also raises NotJson for an object with a repeated name, of which most readers would silently
    drop a value, and for a number that is too large for a float.
    """
    return _loads(text, parse_float=_finite, object_pairs_hook=_unique)


def read_object(value: Any, what: str) -> Any:
    """Return the JSON object or boolean schema that a user gave as a mapping of any class or as
    text. Raises ConstraintError, in which the value is called `what`, if it is neither."""
    if not isinstance(value, str | bool | abc.Mapping):
        raise ConstraintError(f"{what} must be a mapping or its JSON text, got {value!r:.100}")
    try:
        # A mapping is written and read again, because it may contain values that JSON cannot.
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
    """Write a value as JSON without whitespace, keeping the order of members. Raises TypeError or
    ValueError for values that JSON cannot represent."""
    return json.dumps(value, ensure_ascii=False, separators=(",", ":"), allow_nan=False)


def first_repeated(texts: abc.Iterable[str]) -> str | None:
    """Return the first text that occurred before; None if all differ."""
    seen: set[str] = set()
    for text in texts:
        if text in seen:
            return text
        seen.add(text)
    return None


def equality_key(value: Any) -> abc.Hashable:
    """Return a key that is equal for equal JSON values only: true differs from 1, but 1 equals
    1.0."""
    if isinstance(value, dict):
        return "object", frozenset((name, equality_key(item)) for name, item in value.items())
    if isinstance(value, list):
        return "array", tuple(map(equality_key, value))
    return isinstance(value, bool), value


def has_lone_surrogate(text: str) -> bool:
    """Return whether a string contains half of a UTF-16 pair (U+D800 to U+DFFF), which UTF-8 cannot
    encode."""
    try:
        text.encode()
    except UnicodeEncodeError:
        return True
    return False


def _loads(text: str, **hooks: Any) -> Any:
    try:
        return json.loads(text, parse_constant=_refuse_constant, **hooks)
    except json.JSONDecodeError as error:
        raise NotJson(str(error)) from None


def _plain(value: Any) -> Any:
    """Convert a mapping or sequence of another library to a dict or list, which `json` can
    write."""
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
        raise NotJson(f"the name {twice!r:.100} appears twice in one object")
    return members
