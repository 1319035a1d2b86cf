"""Runs /tests.py against a program in another sandbox, which it reaches over standard input and
output, and writes the verdict to the file descriptor in the options.

The tests can use the names that the program defines. Values are copies, made by this process; other
objects, such as functions, stay with the program and are represented by `Remote`. A verdict is a
JSON list: ["passed"], ["wrong", text], ["crash", text], ["lost"] if the program has ended, or
["unsupported", text] if the tests cannot be run this way.
"""

from __future__ import annotations

import builtins
import importlib
import json
import os
import traceback
from collections.abc import Iterator
from typing import IO, Any

from batchgen.evals.programs.inside import copied_values
from batchgen.evals.programs.inside.limits import begin, text_of


class Lost(BaseException):
    """The program has ended, or its answer is damaged."""


class UnsupportedValue(BaseException):
    """The tests pass an object to the program that cannot be copied."""


class Raised(Exception):
    """An exception of the program. Its class is also a subclass of the builtin class of that
    name."""


class Remote:
    """An object of the program. It equals only itself, because a comparison would ask the program
    for the verdict."""

    __slots__ = ("_link", "_number")

    def __init__(self, link: Link, number: int) -> None:
        self._link, self._number = link, number

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return self._link.ask("call", self, list(args), kwargs)

    def __getattr__(self, name: str) -> Any:
        return self._link.ask("attribute", self, name)

    def __iter__(self) -> Iterator[Any]:
        iterator = self._link.ask("iterate", self)
        while True:
            try:
                yield self._link.ask("next", iterator)
            except StopIteration:
                return

    def __next__(self) -> Any:
        return self._link.ask("next", self)

    def __len__(self) -> int:
        return int(self._link.ask("length", self))

    def __getitem__(self, key: Any) -> Any:
        return self._link.ask("item", self, key)

    def __contains__(self, item: Any) -> bool:
        return bool(self._link.ask("contains", self, item))

    def __bool__(self) -> bool:
        return bool(self._link.ask("truth", self))

    def __str__(self) -> str:
        return str(self._link.ask("text", self))


class Link:
    """The connection to the program."""

    def __init__(self, requests: IO[bytes], answers: IO[bytes]) -> None:
        self._requests, self._answers = requests, answers
        self._remotes: dict[int, Remote] = {}

    def ask(self, what: str, *values: Any) -> Any:
        """Return the program's answer to a request, or raise the exception that the program
        raised."""
        forms = [copied_values.encode(value, self._number) for value in values]
        return copied_values.decode_value(self._asked([what, *forms]), self._remote)

    def load(self) -> dict[str, Any]:
        """Run the program, and return the names that it defines, without names of builtins."""
        namespace: dict[str, Any] = {}
        for name, module, form in self._asked(["load"]):
            if not isinstance(name, str) or hasattr(builtins, name):
                continue
            if module is None:
                namespace[name] = copied_values.decode_value(form, self._remote)
                continue
            try:
                namespace[name] = importlib.import_module(module)
            except ImportError:
                continue
        return namespace

    def _asked(self, request: Any) -> Any:
        """Send a request; return the answer in its JSON form, or raise the program's exception."""
        try:
            copied_values.send_message(self._requests, request)
            kind, *parts = copied_values.receive_message(self._answers)
        except (OSError, EOFError, ValueError, TypeError, RecursionError):
            raise Lost from None
        if kind == "raised":
            raise _exception(*parts)
        return parts[0]

    def _number(self, value: Any) -> int:
        if isinstance(value, Remote):
            return value._number
        raise UnsupportedValue(f"the tests give the program a {type(value).__name__}")

    def _remote(self, number: int) -> Remote:
        if number not in self._remotes:
            self._remotes[number] = Remote(self, number)
        return self._remotes[number]


def _exception(names: list[Any], text: str) -> Exception:
    """An exception of the same class and text as the program's."""
    for name in names:
        kind = getattr(builtins, name, None) if isinstance(name, str) else None
        if isinstance(kind, type) and issubclass(kind, Exception):
            try:
                exception: Exception = type(name, (Raised, kind), {})(f"{names[0]}: {text}")
                return exception
            except TypeError:
                continue  # a class that is made of other arguments
    return Raised(f"{names[0]}: {text}")


def _verdict(link: Link, source: str) -> list[str]:
    """Run the tests and return the verdict."""
    try:
        namespace = link.load()
        code = compile(source, "/tests.py", "exec")
        exec(code, {**namespace, "__name__": "tests", "__builtins__": builtins})
    except Lost:
        return ["lost"]
    except UnsupportedValue as error:
        return ["unsupported", str(error)]
    except Raised as error:
        return ["crash", str(error)]
    except AssertionError as error:
        return ["wrong", _place(error, source)]
    except Exception as error:
        return ["crash", f"{type(error).__name__}: {error}"]
    return ["passed"]


def _place(error: AssertionError, source: str) -> str:
    """The line of the tests at which an assertion failed, and its message."""
    lines = source.splitlines()
    frames = [f for f in traceback.extract_tb(error.__traceback__) if f.filename == "/tests.py"]
    line = lines[(frames[-1].lineno or 1) - 1].strip() if frames else ""
    return f"{line} {error}".strip()


def main() -> None:
    """Run the tests and write the verdict."""
    requests, answers = os.fdopen(os.dup(1), "wb"), os.fdopen(os.dup(0), "rb")
    nothing = os.open("/dev/null", os.O_RDWR)
    for fd in (0, 1, 2):
        os.dup2(nothing, fd)
    options = begin()
    verdict = _verdict(Link(requests, answers), text_of("/tests.py"))
    with os.fdopen(options["verdict"], "w") as file:
        file.write(json.dumps([str(part)[:500] for part in verdict]))
