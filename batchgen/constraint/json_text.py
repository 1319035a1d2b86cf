"""JSON as its standard has it, which Python's own reader is too lenient for."""

import json
from typing import Any, NoReturn


class NotJson(ValueError):
    """A text that is not JSON, and why."""


def parse_json(text: str) -> Any:
    """The value of JSON text.

    Raises:
        NotJson: it is none; NaN and Infinity, which Python takes, are not JSON.
        ValueError: a number in it has more digits than Python reads (4300).
        RecursionError: it is nested too deeply for Python.
    """
    try:
        return json.loads(text, parse_constant=_refuse)
    except json.JSONDecodeError as error:
        raise NotJson(str(error)) from None


def parse_unique_json(text: str) -> Any:
    """As `parse_json`, for what a person wrote: a name that stands twice in an object is an error
    too, because readers drop one of the two without a word.
    """
    return json.loads(text, parse_constant=_refuse, object_pairs_hook=_unique)


def compact_json(value: Any) -> str:
    """`value` without whitespace, its keys in their order."""
    return json.dumps(value, ensure_ascii=False, separators=(",", ":"))


def _unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    names = [name for name, _ in pairs]
    if len(set(names)) < len(names):
        raise ValueError(f"the name {max(names, key=names.count)!r} stands twice in one object")
    return dict(pairs)


def _refuse(name: str) -> NoReturn:
    raise NotJson(f"{name} is not JSON")
