"""Encodes the values that a program and its testing code exchange between two sandboxes.

A value becomes JSON: null, true, an integer and a text are themselves; all others are a list of a
letter and parts:

    1.5  →  ["f", "0x1.8000000000000p+0"]        (1, "a")  →  ["t", [1, "a"]]
    {1: 2}  →  ["d", [[1, 2]]]                   an object without a form  →  ["o", NUMBER]

No code in a message is ever run. A value without such a form stays in its
sandbox, and the other side gets a number for it. This file imports nothing of batchgen, because it
runs in a sandbox.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from decimal import Decimal
from fractions import Fraction
from typing import IO, Any

# The letter of a kind → the function that makes a value of its items, or of its text.
_LISTS: Mapping[str, Callable[..., Any]] = {"l": list, "t": tuple, "s": set, "z": frozenset}
_LETTERS: Mapping[type[Any], str] = {list: "l", tuple: "t", set: "s", frozenset: "z"}
_TEXTS: Mapping[str, Callable[[str], Any]] = {
    "f": float.fromhex,
    "b": bytes.fromhex,
    "y": bytearray.fromhex,
    "D": Decimal,
    "F": Fraction,
}
MOST_BYTES = 64 << 20
"""The most bytes of a message."""


def encode(value: Any, refer: Callable[[Any], int]) -> Any:
    """The JSON form of a value. Subclasses become their base type: a Counter becomes a dict.

    Args:
        refer: called for a value without a form; returns its number.
    """
    if value is None or isinstance(value, bool):
        return value
    if isinstance(value, (int, str)):
        return int(value) if isinstance(value, int) else str(value)
    if isinstance(value, float):
        return ["f", float.hex(value)]
    if isinstance(value, complex):
        return ["c", float.hex(value.real), float.hex(value.imag)]
    if isinstance(value, (bytes, bytearray)):
        return ["b" if isinstance(value, bytes) else "y", value.hex()]
    if isinstance(value, (Decimal, Fraction)):
        return ["D" if isinstance(value, Decimal) else "F", str(value)]
    if isinstance(value, dict):
        return ["d", [[encode(k, refer), encode(v, refer)] for k, v in value.items()]]
    for kind, letter in _LETTERS.items():
        if isinstance(value, kind):
            return [letter, [encode(item, refer) for item in value]]
    if isinstance(value, range):
        return ["r", value.start, value.stop, value.step]
    if type(value).__module__ == "numpy" and hasattr(value, "tolist"):
        plain = value.tolist()
        if type(plain) is type(value):  # a long double, which becomes the closest Python number
            plain = complex(value) if value.dtype.kind == "c" else float(value)
        return encode(plain, refer)
    return ["o", refer(value)]


def decode_value(form: Any, referred: Callable[[int], Any]) -> Any:
    """The value of a JSON form. `referred` returns the value of a number.

    Raises:
        ValueError, TypeError: it is not such a form.
    """
    try:
        return _value_of(form, referred)
    except (ArithmeticError, LookupError, RecursionError) as error:
        raise ValueError("no such form") from error


def _value_of(form: Any, referred: Callable[[int], Any]) -> Any:
    if not isinstance(form, list):
        if isinstance(form, (float, dict)):
            raise ValueError("no such form")
        return form
    letter, *parts = form
    if letter in _LISTS:
        return _LISTS[letter](_value_of(item, referred) for item in parts[0])
    if letter == "d":
        return {_value_of(k, referred): _value_of(v, referred) for k, v in parts[0]}
    if letter in _TEXTS:
        return _TEXTS[letter](parts[0])
    if letter == "c":
        return complex(*map(float.fromhex, parts))
    if letter == "r":
        return range(*parts)
    if letter == "o":
        return referred(parts[0])
    raise ValueError("no such form")


def send_message(file: IO[bytes], message: Any) -> None:
    """Write a message, any JSON value."""
    data = json.dumps(message).encode()
    if len(data) > MOST_BYTES:
        raise ValueError(f"a value of {len(data)} bytes is too large")
    file.write(len(data).to_bytes(8, "big") + data)
    file.flush()


def receive_message(file: IO[bytes]) -> Any:
    """Read a message.

    Raises:
        EOFError: there is none.
        ValueError: it is damaged.
    """
    head = file.read(8)
    size = int.from_bytes(head, "big")
    if len(head) < 8:
        raise EOFError
    if size > MOST_BYTES:
        raise ValueError("no message")
    data = file.read(size)
    if len(data) < size:
        raise EOFError
    return json.loads(data)
