"""`RunTests`: programs of answers against tests of code, and against inputs and outputs."""

import base64
import json
import pickle
import pickletools
import shutil
import zlib
from pathlib import Path
from typing import Any

import pytest

from batchgen.config.groups.job_config import StepConfig
from batchgen.evals.graders.build_steps import check_machine, post_steps
from batchgen.evals.graders.extract import Extract
from batchgen.evals.graders.grade_rows import Grader
from batchgen.evals.graders.run_tests import RunTests
from batchgen.evals.graders.step import AnswerRow, GradeFailure
from batchgen.evals.programs.cases import read_cases, same_output, unpacked
from batchgen.evals.programs.interpreter import interpreter
from batchgen.evals.programs.known_results import KnownResults
from batchgen.util.errors import ConfigError
from tests.support.sandboxes import need_sandbox


@pytest.fixture(autouse=True)
def own_cache(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Path:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    return tmp_path / "batchgen" / "programs"


def outcome(step: RunTests, program: str | None, **fields: Any) -> tuple[Any, ...]:
    values = step.apply(AnswerRow("", fields, {"answer": program}))
    return values["mark"], values["test_result"], values["test_detail"]


ASSERT = RunTests(seconds=5, packages=["numpy"], memory_mib=512)
ADD = "def add(a, b):\n    return a + b"
CHECK = "import numpy as np\ndef check(candidate):\n    assert np.allclose(candidate(1, 2), 3)\n"
CODE = [
    (ADD, "assert add(1, 2) == 3", 1.0, "passed"),
    (ADD, ["assert add(1, 2) == 3", "assert add([1], [2]) == [1, 2]"], 1.0, "passed"),
    (ADD, "assert add(1, 2) == 4, 'no'", 0.0, "wrong"),
    (f"    {ADD}".replace("\n", "\n    "), "assert add(1, 2) == 3", 1.0, "passed"),
    ("def add(a, b): return (a, {b: [a]}, {1}, None, 1j, b'x', 2.5)", None, 1.0, "passed"),
    ("def add(a, b): yield from (a, b)", "assert list(add(1, 2)) == [1, 2]", 1.0, "passed"),
    ("class A:\n x = 3\n def add(s): return s", "assert A().add().x == 3", 1.0, "passed"),
    ("import math", "assert math.floor(1.5) == 1", 1.0, "passed"),
    ("N = [1, 2]", "assert N == [1, 2]", 1.0, "passed"),
    ("def add(x): raise KeyError(x)", "try: add(1)\nexcept KeyError: pass", 1.0, "passed"),
    ("def add(x): assert x", "add(0)", 0.0, "crash"),
    ("def add(x): exit()", "add(0)", 0.0, "crash"),
    ("x = ", "add(0)", 0.0, "crash"),
    ("x = 1", "add(0)", 0.0, "crash"),
    ("if __name__ == '__main__': 1 / 0", "assert True", 1.0, "passed"),
    (None, "assert True", 0.0, None),
]
LITERALS = "assert add(1, 2) == (1, {2: [1]}, {1}, None, 1j, b'x', 2.5)"


def test_code_says_what_a_program_is_worth() -> None:
    need_sandbox()
    for program, tests, mark, result in CODE:
        found = outcome(ASSERT, program, tests=LITERALS if tests is None else tests)
        assert found[:2] == (mark, result), (program, found)
        assert (found[2] is None) == (mark == 1.0)


def test_a_function_is_checked_by_its_name() -> None:
    need_sandbox()
    step = RunTests(tests="test", function="entry", packages=["numpy"], seconds=5)
    assert outcome(step, ADD, test=CHECK, entry="add")[:2] == (1.0, "passed")
    wrong = ADD.replace("+", "-")
    assert outcome(step, wrong, test=CHECK, entry="add")[1:] == (
        "wrong",
        "assert np.allclose(candidate(1, 2), 3)",
    )


@pytest.mark.parametrize(
    ("fields", "kind", "says"),
    [
        ({"tests": None, "entry": "f"}, "no_target", "no value in column 'tests'"),
        ({"tests": [1], "entry": "f"}, "bad_target", "must be code"),
        ({"tests": "f(lambda: 1)", "entry": None}, "bad_target", "a function"),
        ({"tests": "pass", "entry": "a b"}, "bad_target", "not the name of a function"),
        ({"tests": "pass", "entry": "{"}, "bad_target", "not the name of a function"),
    ],
)
def test_unfit_tests_say_nothing_of_the_program(
    fields: dict[str, Any], kind: str, says: str
) -> None:
    need_sandbox()
    with pytest.raises(GradeFailure, match=says) as raised:
        RunTests(function="entry").apply(AnswerRow("", fields, {"answer": "f = print"}))
    assert raised.value.type == kind


CASES = RunTests(method="cases", tests=["public", "private"], function="metadata", seconds=2)
SUMS = [{"input": "1 2\n", "output": "3\n", "testtype": "stdin"}, {"input": "4 5", "output": "9"}]
CALLS = [{"input": "[1, 2]\n3", "output": "[1, 2, 3]", "testtype": "functional"}]


def packed(value: Any) -> str:
    return base64.b64encode(zlib.compress(pickle.dumps(json.dumps(value)))).decode()


def test_cases_of_input_and_output() -> None:
    need_sandbox()
    row: dict[str, Any] = {"public": json.dumps(SUMS[:1]), "private": packed(SUMS[1:])}
    row["metadata"] = "{}"
    programs = {
        "print(sum(map(int, input().split())))": (1.0, "passed", None),
        "print(float(sum(map(int, input().split()))), end='  ')": (1.0, "passed", None),
        "print(3)": (0.0, "wrong", "case 1: '3' is not '9'"),
        "import os; print(3, flush=True); os._exit(1)": (
            0.0,
            "crash",
            "case 0: it ended with code 1",
        ),
        "a = input()\nb = input()": (
            0.0,
            "crash",
            "case 0: EOFError: EOF when reading a line",
        ),
        "import os; os.fork()": (
            0.0,
            "forbidden",
            "case 0: a system call that programs may not make",
        ),
        "import sys\nprint(sum(map(int, sys.stdin.read().split())))\nsys.exit(1)": (
            1.0,
            "passed",
            None,
        ),
    }
    for program, wanted in programs.items():
        assert outcome(CASES, program, **row) == wanted


def test_cases_that_call_a_function() -> None:
    need_sandbox()
    row = {"public": CALLS, "private": packed(CALLS), "metadata": '{"func_name": "join"}'}
    right = "class Solution:\n def join(self, a, b): return (*a, b)"
    assert outcome(CASES, right, **row) == (1.0, "passed", None)
    assert outcome(CASES, "def join(a, b): return a + [b]", **row)[0] == 1.0
    assert outcome(CASES, "def join(a, b): return a", **row)[1] == "wrong"
    with pytest.raises(GradeFailure, match="whose name the row lacks"):
        outcome(CASES, right, **(row | {"metadata": "{}"}))


def test_a_program_runs_once(own_cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    need_sandbox()
    row = {"tests": "assert add(1, 2) == 3"}
    first = outcome(ASSERT, ADD, **row)
    assert len(list(own_cache.iterdir())) == 1
    outcome(RunTests(seconds=4), ADD, **row)
    assert len(list(own_cache.iterdir())) == 2, "limits and packages are of the key"
    monkeypatch.setattr(shutil, "which", lambda name: None)
    assert outcome(ASSERT, ADD, **row) == first
    for entry in own_cache.iterdir():
        entry.write_text('{"outcome": "won", "detail": null}')
    with pytest.raises(ConfigError, match="not installed here"):
        outcome(ASSERT, ADD, **row)


def test_what_was_over_its_time_runs_again(own_cache: Path) -> None:
    need_sandbox()
    step = RunTests(seconds=0.5, total_seconds=20)
    found = outcome(step, "while True: pass", tests="pass")
    assert found[:2] == (0.0, "timeout")
    assert not own_cache.exists()


class Bomb:
    """An object whose pickle would run code."""

    def __reduce__(self) -> tuple[Any, ...]:
        return (print, ("executed",))


HOSTILE = {
    "a call": pickle.dumps(Bomb()),
    "a list of texts": pickle.dumps(["a"]),
    "a global": b"cos\nsystem\n.",
    "two texts": pickle.dumps("a")[:-1] + pickle.dumps("b"),
    "a persistent id": b"Px\n.",
    "bytes": pickle.dumps(b"a"),
    "nothing": b".",
    "noise": b"\xff\x00",
    "a text that is cut": pickle.dumps("a" * 300)[:-200],
}


@pytest.mark.parametrize("what", HOSTILE)
def test_encoded_tests_are_a_text_and_nothing_else(
    what: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(ValueError):
        unpacked(base64.b64encode(zlib.compress(HOSTILE[what])).decode())
    assert capsys.readouterr().out == ""


@pytest.mark.parametrize("protocol", range(pickle.HIGHEST_PROTOCOL + 1))
def test_texts_of_every_protocol_are_read(protocol: int) -> None:
    for text in ("[]", "é\n" * 200):
        for data in (pickle.dumps(text, protocol), pickletools.optimize(pickle.dumps(text))):
            assert unpacked(base64.b64encode(zlib.compress(data)).decode()) == text


def test_a_bomb_of_zlib_is_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("batchgen.evals.programs.cases._MOST_BYTES", 1000)
    with pytest.raises(ValueError, match="more than 1,000 bytes"):
        unpacked(base64.b64encode(zlib.compress(bytes(10**6))).decode())


@pytest.mark.parametrize("value", ["x", "3", [1], [{"input": 1, "output": ""}], {"input": ""}])
def test_no_cases(value: Any) -> None:
    with pytest.raises(ValueError):
        read_cases(value)


@pytest.mark.parametrize(
    ("output", "wanted", "same"),
    [
        ("3\n", "3", True),
        (" 3 \n 4\n", "3\n4", True),
        ("3.0 4", "3 4.00", True),
        ("3\n\n4", "3\n4", False),
        ("a", "A", False),
        ("50000000000000001", "50000000000000000", False),
        ("", "", True),
        ("nan", "nan", True),
    ],
)
def test_outputs_are_compared_by_lines(output: str, wanted: str, same: bool) -> None:
    assert same_output(output, wanted) is same


@pytest.mark.parametrize(
    ("options", "says"),
    [
        ({"method": "run"}, "assert or cases"),
        ({"tests": []}, "tests is empty"),
        ({"seconds": 0}, "seconds must be above 0"),
        ({"seconds": 90}, "at most total_seconds"),
        ({"memory_mib": 3}, "at least 64"),
    ],
)
def test_mistakes_in_options(options: dict[str, Any], says: str) -> None:
    with pytest.raises(ConfigError, match=says):
        RunTests(**options)


def test_a_machine_without_bubblewrap_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    """Nothing weaker takes its place."""
    from batchgen.evals.programs.probe import check_sandbox

    check_sandbox.cache_clear()
    monkeypatch.setattr(shutil, "which", lambda name: None)
    with pytest.raises(ConfigError, match="apt-get install bubblewrap"):
        check_machine([RunTests()])


@pytest.mark.parametrize(
    ("script", "says"),
    [
        ("exit 1", "cannot make a sandbox here"),
        # It runs the program without any sandbox.
        ('while [ "$1" != -- ]; do [ "$1" = --json-status-fd ] && fd=$2; shift; done; shift\n'
         'eval "echo exit-code >&$fd"; exec "$@"', "cannot make a sandbox|does not hold"),
    ],
)  # fmt: skip
def test_a_sandbox_that_does_not_hold_is_refused(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, script: str, says: str
) -> None:
    from batchgen.evals.programs.probe import check_sandbox

    stub = tmp_path / "bwrap"
    stub.write_text(f"#!/bin/bash\n{script}\n")
    stub.chmod(0o755)
    check_sandbox.cache_clear()
    monkeypatch.setattr(shutil, "which", lambda name: str(stub))
    with pytest.raises(ConfigError, match=says):
        check_machine([RunTests()])


def test_interpreters_and_packages_are_asked_for() -> None:
    assert "numpy==" in interpreter(None, ("numpy",)).name
    with pytest.raises(ConfigError, match="lacks no-such-thing"):
        interpreter(None, ("no-such-thing",))
    with pytest.raises(ConfigError, match="does not say where its files are"):
        interpreter("/no/python", ())


def test_another_interpreter_runs_programs() -> None:
    need_sandbox()
    own = Path("/usr/bin/python3")
    if not own.is_file():
        pytest.skip("the system has no Python of its own")
    step = RunTests(python=str(own), seconds=5)
    check_machine([step])
    version = interpreter(str(own), ()).version
    program = f"import sys; assert sys.version.startswith({version!r})\ndef f(x): return x"
    assert outcome(step, program, tests="assert f([1]) == [1]")[:2] == (1.0, "passed")


def test_a_chain_runs_programs_in_workers() -> None:
    need_sandbox()
    post = [
        StepConfig(target="Extract", options={"methods": ["code"]}),
        StepConfig(target="RunTests", options={"seconds": 5, "packages": ["numpy"]}),
    ]
    text = f"So:\n```python\n{ADD}\n```\nThat is it."
    rows = [(text, {"tests": "assert add(2, 3) == 5"}), ("Well", {"tests": "pass"}), (None, {})]
    with Grader(post_steps(post), workers=1, seconds=0.5) as grader:
        found = list(grader.grade(rows))
    assert [row["mark"] for row in found] == [1.0, 0.0, None]
    assert [row["test_result"] for row in found] == ["passed", None, None]


def test_the_program_keeps_its_indentation() -> None:
    step = Extract(methods=("code",))
    found = step.apply(AnswerRow("1. So\n   ```py\n   a\n     b\n   ```\n", {}, {}))
    assert found["answer"] == "   a\n     b"
    assert KnownResults().get("x") is None
