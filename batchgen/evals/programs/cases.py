"""Reads the tests of a row as inputs and expected outputs, and compares outputs, for `RunTests`.

[{"input": "1 2", "output": "3"}]  →  [Case("1 2", "3", calls=False)]
"""

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
"""The most bytes of encoded tests after unpacking."""
# Names of pickle's operations: those that hold a text, and those that may surround one.
_TEXTS = {"SHORT_BINUNICODE", "BINUNICODE", "BINUNICODE8", "UNICODE"}
_AROUND = {"PROTO", "FRAME", "MEMOIZE", "BINPUT", "LONG_BINPUT", "PUT", "STOP"}


@dataclass(frozen=True, slots=True)
class Case:
    """One test.

    Attributes:
        input: the standard input; for a function, its arguments as JSON, one on a line.
        output: the expected output; for a function, the expected result as JSON.
        calls: whether a function is called.
    """

    input: str
    output: str
    calls: bool


def read_cases(value: Any) -> list[Case]:
    """Read the tests in a column: a list of objects with `input` and `output`, such a list as JSON,
    or LiveCodeBench's encoded form of that JSON.

    Raises:
        ValueError: the value has none of these forms.
    """
    listed = _listed(value) if isinstance(value, str) else value
    if not isinstance(listed, list) or not all(isinstance(test, Mapping) for test in listed):
        raise ValueError(
            f"tests must be a list of objects with input and output, got {listed!r:.80}"
        )
    return [_case(test) for test in listed]


def _case(test: Mapping[str, Any]) -> Case:
    """One test of an object. Raises ValueError if a key is missing or wrong."""
    stdin, wanted = test.get("input"), test.get("output")
    if not isinstance(stdin, str) or not isinstance(wanted, str):
        raise ValueError(f"a test must have the texts input and output, got {dict(test)!r:.80}")
    kind = test.get("testtype", "stdin")
    if kind not in ("stdin", "functional"):
        raise ValueError(f"testtype must be stdin or functional, got {kind!r:.80}")
    return Case(stdin, wanted, kind == "functional")


def _listed(text: str) -> Any:
    """The value of a JSON text, or of the JSON text that is packed in it (see `unpacked`)."""
    try:
        return json.loads(text)
    except ValueError:
        return json.loads(unpacked(text))


def unpacked(text: str) -> str:
    """The text in an encoded form, which is base64 of zlib of pickle. Nothing is unpickled: the
    pickle may only contain a single text, which is taken out.

    Raises:
        ValueError: the form is another one, or it holds anything but one text, or more than 256
            MiB.
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
    """Whether an operation of pickle adds a text.

    Raises:
        ValueError: it does anything else than build a single text.
    """
    if name not in _TEXTS and name not in _AROUND:
        raise ValueError(f"encoded tests hold more than a text (pickle's {name}): not read")
    return name in _TEXTS


def same_output(output: str, wanted: str) -> bool:
    """Whether a program has written the expected output: the same lines without white space at
    their ends. A line may also have the same numbers in another form (LiveCodeBench's rule)."""
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
    """Code that calls a function, or the method of that name of a class Solution, for each case."""
    pairs = [(case.input, case.output) for case in cases]
    return (
        "import json\n"
        f"_call = Solution().{function} if 'Solution' in globals() else {function}\n"
        f"for _place, (_given, _wanted) in enumerate({pairs!r}):\n"
        "    _found = _call(*map(json.loads, _given.split('\\n')))\n"
        "    _found = list(_found) if isinstance(_found, tuple) else _found\n"
        "    assert _found == json.loads(_wanted), f'(case {_place})'\n"
    )
