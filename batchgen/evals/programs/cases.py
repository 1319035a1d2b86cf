"""Reads the tests of a row as inputs and expected outputs, and compares outputs."""

from __future__ import annotations

import base64
import binascii
import io
import json
import pickletools
import zlib
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from decimal import Decimal, InvalidOperation
from typing import Any

_MOST_BYTES = 256 << 20
"""Bytes of encoded tests when they are unpacked."""
_TEXTS = {"SHORT_BINUNICODE", "BINUNICODE", "BINUNICODE8", "UNICODE"}
_AROUND = {"PROTO", "FRAME", "MEMOIZE", "BINPUT", "LONG_BINPUT", "PUT", "STOP"}


@dataclass(frozen=True, slots=True)
class Case:
    """One test.

    Attributes:
        input: what the program reads; for a function, its arguments as JSON, one on a line.
        output: what it must write; for a function, what it must return, as JSON.
        calls: whether a function is called.
    """

    input: str
    output: str
    calls: bool


def read_cases(value: Any) -> list[Case]:
    """The tests that a column holds: a list of objects with `input` and `output`, such a list as
    JSON, or LiveCodeBench's encoded form of that JSON.

    Raises:
        ValueError: it holds nothing of that kind.
    """
    listed = _listed(value) if isinstance(value, str) else value
    if not isinstance(listed, list) or not all(isinstance(each, Mapping) for each in listed):
        raise ValueError(
            f"tests must be a list of objects with input and output, got {listed!r:.80}"
        )
    return [_case(each) for each in listed]


def _case(test: Mapping[str, Any]) -> Case:
    stdin, wanted = test.get("input"), test.get("output")
    if not isinstance(stdin, str) or not isinstance(wanted, str):
        raise ValueError(f"a test must have the texts input and output, got {dict(test)!r:.80}")
    kind = test.get("testtype", "stdin")
    if kind not in ("stdin", "functional"):
        raise ValueError(f"testtype must be stdin or functional, got {kind!r:.80}")
    return Case(stdin, wanted, kind == "functional")


def _listed(text: str) -> Any:
    """What a text of JSON says, or the text that is packed in it."""
    try:
        return json.loads(text)
    except ValueError:
        return json.loads(unpacked(text))


def unpacked(text: str) -> str:
    """The text that base64, zlib and pickle were made of, in that order from outside. Nothing is
    unpickled: the only thing that is taken out is a text that stands there alone.

    Raises:
        ValueError: it is not made so, holds anything but one text, or more than 256 MiB.
    """
    try:
        stream = zlib.decompressobj()
        data = stream.decompress(base64.b64decode(text, validate=True), _MOST_BYTES)
        if not stream.eof:
            raise ValueError(f"encoded tests are cut off, or hold more than {_MOST_BYTES:,} bytes")
        contents = [
            argument
            for code, argument, _ in pickletools.genops(io.BytesIO(data))
            if _is_text(code.name)
        ]
    except (binascii.Error, zlib.error) as error:
        raise ValueError(f"these are neither JSON nor encoded tests: {error}") from None
    if len(contents) != 1 or not isinstance(contents[0], str):
        raise ValueError("encoded tests must hold one text")
    return contents[0]


def _is_text(name: str) -> bool:
    """Whether an operation of pickle puts a text. Raises ValueError if it does more than that."""
    if name not in _TEXTS and name not in _AROUND:
        raise ValueError(f"encoded tests hold more than a text (pickle's {name}): not read")
    return name in _TEXTS


def same_output(output: str, wanted: str) -> bool:
    """Whether a program has written what it must: the same lines without white space at their ends,
    of which each may also be the same numbers (LiveCodeBench's rule)."""
    lines, wanted_lines = _lines(output), _lines(wanted)
    return len(lines) == len(wanted_lines) and all(map(_same_line, lines, wanted_lines))


def _lines(text: str) -> list[str]:
    return [line.strip() for line in text.strip().split("\n")]


def _same_line(line: str, wanted: str) -> bool:
    return line == wanted or (
        (numbers := _numbers(line)) is not None and numbers == _numbers(wanted)
    )


def _numbers(line: str) -> list[Decimal] | None:
    try:
        return [Decimal(word) for word in line.split()]
    except InvalidOperation:
        return None


def calling_tests(cases: Iterable[Case], function: str) -> str:
    """Code that calls a function for cases, or the method of that name of a class Solution."""
    pairs = [(case.input, case.output) for case in cases]
    return (
        "import json\n"
        f"_call = Solution().{function} if 'Solution' in globals() else {function}\n"
        f"for _place, (_given, _wanted) in enumerate({pairs!r}):\n"
        "    _found = _call(*map(json.loads, _given.split('\\n')))\n"
        "    _found = list(_found) if isinstance(_found, tuple) else _found\n"
        "    assert _found == json.loads(_wanted), f'(case {_place})'\n"
    )
