"""Runs in the sandbox: loads /program.py, and answers the calls of the testing code
(`testing_code.py`) over standard input and output.

The program sees neither of them: it gets /dev/null. The answer to a request is ["ok", value] or
["raised", names of the exception's classes, its text].
"""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Mapping
from types import ModuleType
from typing import Any

from batchgen.evals.programs.inside import copied_values
from batchgen.evals.programs.inside.limits import begin, text_of


class Program:
    """The loaded program, and those of its objects that the testing code knows by a number."""

    def __init__(self) -> None:
        self._module = ModuleType("program")
        self._objects: list[Any] = []
        self._numbers: dict[int, int] = {}

    def load(self) -> None:
        """Run the program."""
        sys.modules["program"] = self._module
        code = compile(text_of("/program.py"), "/program.py", "exec")
        exec(code, self._module.__dict__)

    def names(self) -> list[Any]:
        """The names that the program defines, as lists [name, module's name or null, value]."""
        values: list[Any] = []
        for name, value in list(self._module.__dict__.items()):
            if name.startswith("__"):
                continue
            module = value.__name__ if isinstance(value, ModuleType) else None
            values.append([name, module, None if module else self._encoded(value)])
        return values

    def do(self, what: str, *forms: Any) -> Any:
        """Do one operation with encoded values, and return the encoded result."""
        if what == "load":
            self.load()
            return self.names()
        decoded = [copied_values.decode_value(form, self._objects.__getitem__) for form in forms]
        return self._encoded(_OPERATIONS[what](*decoded))

    def _encoded(self, value: Any) -> Any:
        return copied_values.encode(value, self._number)

    def _number(self, value: Any) -> int:
        if id(value) not in self._numbers:
            self._numbers[id(value)] = len(self._objects)
            self._objects.append(value)
        return self._numbers[id(value)]


# What the testing code can ask for, by the names that `Link.ask` sends.
_OPERATIONS: Mapping[str, Callable[..., Any]] = {
    "call": lambda function, args, kwargs: function(*args, **kwargs),
    "attribute": getattr,
    "iterate": iter,
    "next": next,
    "length": len,
    "item": lambda value, key: value[key],
    "contains": lambda value, item: item in value,
    "truth": bool,
    "text": str,
}


def raised(error: BaseException) -> list[Any]:
    """The answer to a request that raised an exception."""
    names = [kind.__name__ for kind in type(error).__mro__]
    try:
        text = str(error)[:1000]
    except BaseException:
        text = ""
    return ["raised", names, text]


def main() -> None:
    """Answer requests until there are none left."""
    requests, answers = os.fdopen(os.dup(0), "rb"), os.fdopen(os.dup(1), "wb")
    nothing = os.open("/dev/null", os.O_RDWR)
    for fd in (0, 1, 2):
        os.dup2(nothing, fd)
    begin()
    program = Program()
    while True:
        try:
            request = copied_values.receive_message(requests)
        except EOFError:
            return
        try:
            answer = ["ok", program.do(*request)]
        except BaseException as error:  # a program may also raise SystemExit
            answer = raised(error)
        copied_values.send_message(answers, answer)
