"""Made programs, more than 100, against made tests: what comes of each follows from how it is
made."""

from __future__ import annotations

import operator
from collections.abc import Callable, Iterator
from itertools import islice
from pathlib import Path
from typing import Any, NamedTuple

import pytest

from batchgen.evals.graders.run_tests import RunTests
from batchgen.evals.graders.step import AnswerRow
from tests.support.sandboxes import need_sandbox


@pytest.fixture(autouse=True)
def own_cache(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))


class Made(NamedTuple):
    """A program, its tests, and what must come of it."""

    program: str
    tests: Any
    result: str


OPERATORS: dict[str, Callable[[int, int], Any]] = {
    "+": operator.add,
    "-": operator.sub,
    "*": operator.mul,
    "//": operator.floordiv,
    "%": operator.mod,
    "**": operator.pow,
}


def operations() -> Iterator[Made]:
    """Each operator, and against the tests of each other one."""
    for sign in OPERATORS:
        for wanted, compute in OPERATORS.items():
            tests = [f"assert f({a}, {b}) == {compute(a, b)}" for a, b in ((7, 3), (-9, 4), (0, 5))]
            result = "passed" if sign == wanted else "wrong"
            yield Made(f"def f(a, b):\n    return a {sign} b", tests, result)


FORMS = (
    ("def f(x): return {}", "f({}) == {}"),
    ("f = lambda x: {}", "f({}) == {}"),
    ("class A:\n    def f(self, x):\n        return {}", "A().f({}) == {}"),
    ("def g(x):\n    yield {}\nimport math", "list(g({})) == [{}]"),
)
TEXTS = (
    ("x[::-1]", "abc", "cba"),
    ("x.upper()", "straße", "STRASSE"),
    ("sorted(x)", "cab", ["a", "b", "c"]),
    ("{c: x.count(c) for c in x}", "aab", {"a": 2, "b": 1}),
    ("(len(x), x == x[::-1])", "anna", (4, True)),
)


def forms() -> Iterator[Made]:
    """Functions, lambdas, methods and generators, right and wrong by one value."""
    for program, test in FORMS:
        for code, given, value in TEXTS:
            for wanted, result in ((value, "passed"), ([value], "wrong")):
                tests = "assert " + test.format(repr(given), repr(wanted))
                yield Made(program.replace("{}", code), tests, result)


CRASHES = (
    "def f(x: return 1",
    "def g(x): return x",
    "def f(x): return y",
    "def f(x): return 1 / (x - 1)",
    "def f(x): return [][x]",
    "def f(x): return {}[x]",
    "def f(x): return int('one')",
    "def f(x): return f(x)",
    "def f(x): return x + '1'",
    "def f(): return 1",
    "def f(x): raise SystemExit(0)",
    "def f(x): import os; os._exit(0)",
    "def f(x): return bytearray(10 ** 10)",
    "import no_such_package\ndef f(x): return 1",
)
FORBIDDEN = (
    "import os\nos.fork()",
    "import socket\nsocket.socket()",
    "import subprocess\nsubprocess.run(['true'])",
)


def failures() -> Iterator[Made]:
    """Programs that end otherwise than by a wrong value."""
    for program in CRASHES:
        yield Made(program, "assert f(1) == 1", "crash")
    for program in FORBIDDEN:
        yield Made(f"{program}\ndef f(x): return 1", "assert f(1) == 1", "forbidden")
    for program in ("while True: pass", "import time\ntime.sleep(99)"):
        yield Made(f"def f(x):\n    {program}".replace("\nt", "\n    t"), "f(1)", "timeout")


def outputs() -> Iterator[Made]:
    """Programs that read and write, against cases whose last one tells them apart."""
    programs: dict[str, Callable[[list[int]], int]] = {
        "sum": sum,
        "max": max,
        "min": min,
        "len": len,
    }
    for own in programs:
        for wanted, compute in programs.items():
            numbers = ([5], [1, 2], [4, -1, 7])
            cases = [{"input": " ".join(map(str, n)), "output": str(compute(n))} for n in numbers]
            program = f"print({own}(list(map(int, input().split()))))"
            yield Made(program, cases, "passed" if own == wanted else "wrong")


ALL = {made.__name__: made for made in (operations, forms, failures, outputs)}


def _wrong(kind: str, most: int | None = None) -> list[Any]:
    """The programs of a kind of which something else came."""
    method: Any = "cases" if kind == "outputs" else "assert"
    found = []
    for made in islice(ALL[kind](), most):
        total = 3.0 if made.result == "timeout" else 60.0  # however busy the machine is
        step = RunTests(method=method, seconds=1.0, total_seconds=total, memory_mib=256)
        values = step.apply(AnswerRow("", {"tests": made.tests}, {"answer": made.program}))
        mark = float(made.result == "passed")
        if (values["mark"], values["test_result"]) != (mark, made.result):
            found.append((made, values))
    return found


@pytest.mark.thorough
@pytest.mark.parametrize("kind", ALL)
def test_what_comes_of_a_program(kind: str) -> None:
    need_sandbox()
    assert _wrong(kind) == []


@pytest.mark.parametrize("kind", ["operations", "outputs"])
def test_what_comes_of_a_few_programs(kind: str) -> None:
    need_sandbox()
    assert _wrong(kind, 2) == []


def test_there_are_more_than_100() -> None:
    every = [made for kind in ALL.values() for made in kind()]
    assert len(every) > 100
    assert {made.result for made in every} == {"passed", "wrong", "crash", "timeout", "forbidden"}
