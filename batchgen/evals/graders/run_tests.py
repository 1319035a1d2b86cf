"""The grader `RunTests`, a post step: runs the program in an answer against tests, in a sandbox."""

from __future__ import annotations

import json
import re
import textwrap
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any, Literal

from batchgen.evals.graders.step import AnswerRow, Column, GradeFailure
from batchgen.evals.programs.cases import Case, calling_tests, read_cases, same_output
from batchgen.evals.programs.interpreter import interpreter
from batchgen.evals.programs.known_results import KnownResults, result_key
from batchgen.evals.programs.probe import check_sandbox
from batchgen.evals.programs.run_program import ProgramResult, UnfitTests, run_tests, run_with_input
from batchgen.evals.programs.sandbox import Sandbox, SandboxError
from batchgen.util.errors import ConfigError

_LEAST_OUTPUT = 1 << 20
"""Bytes that a program may write in any case, however short the expected output is."""


@dataclass(frozen=True, kw_only=True)
class RunTests:
    """Runs the Python program in an answer against the tests of its row: `mark` is 1 if it passes
    all of them.

    Programs run in a sandbox of bubblewrap (apt-get install bubblewrap): without network, files of
    this machine, a place to write, other processes and environment variables. When the job begins,
    programs try to get out of the sandbox. The job is refused if one succeeds, or if bubblewrap is
    missing. `test_result` is the outcome of a program: passed, wrong, timeout, crash (an error, or
    too much memory or output) or forbidden (it made a process, a socket or the like). The first
    test that fails ends the program. Results are kept in the user's cache, and a program with the
    same tests runs only once.

    - `assert`: the tests are code that calls the program and raises AssertionError. The code runs
      in a second sandbox, and gets copies of the values that the program returns: None, numbers,
      texts, bytes, lists, tuples, sets, dicts, and numpy's arrays as lists. Other objects stay in
      the first sandbox, and equal only themselves.
    - `cases`: the tests are inputs and outputs: a list of objects with `input` and `output`, such a
      list as JSON, or LiveCodeBench's encoded form of it. A program reads standard input and writes
      standard output; lines are compared without white space at their ends, and numbers by their
      values. Cases with the testtype `functional` call `function`, or the method of that name of a
      class Solution, with the arguments on the lines of the input, as JSON.

    Attributes:
        method: the kind of tests, `assert` or `cases`.
        program: the column with the program, which an earlier step wrote (Extract with the method
            code).
        tests: the column with the tests, or several columns, whose tests follow each other.
        function: the column with the name of the function that is tested, as text or as
            {"func_name": NAME} in JSON. With assert, check(NAME) is added to tests without it.
        prelude: code that is put before each program.
        seconds: the CPU time for one test; with `assert` all code of the tests is one test.
        total_seconds: the longest wall-clock time for all tests of a program.
        memory_mib: the address space of a program, and that of its tests.
        python: the path of the interpreter; null takes the one that runs batchgen.
        packages: names of packages that programs and tests may import, as they are installed for
            that interpreter.
        prefix: put before the names of the columns.
    """

    # See `PostStep`.
    version = 1
    isolated = True
    reads_text = False

    method: Literal["assert", "cases"] = "assert"
    program: str = "answer"
    tests: str | Sequence[str] = "tests"
    function: str | None = None
    prelude: str = ""
    seconds: float = 10.0
    total_seconds: float = 60.0
    memory_mib: int = 1024
    python: str | None = None
    packages: Sequence[str] = ()
    prefix: str = ""

    def __post_init__(self) -> None:
        tests = (self.tests,) if isinstance(self.tests, str) else tuple(self.tests)
        object.__setattr__(self, "tests", tests)
        object.__setattr__(self, "packages", tuple(self.packages))
        if self.method not in ("assert", "cases"):
            raise ConfigError(f"RunTests: method must be assert or cases, got {self.method!r}")
        if not tests:
            raise ConfigError("RunTests: tests is empty: name the column with the tests")
        if not 0 < self.seconds <= self.total_seconds:
            raise ConfigError(
                "RunTests: seconds must be above 0 and at most total_seconds, got "
                f"{self.seconds:g} and {self.total_seconds:g}"
            )
        if self.memory_mib < 64:
            raise ConfigError(f"RunTests: memory_mib must be at least 64, got {self.memory_mib}")

    @property
    def columns(self) -> tuple[Column, ...]:
        columns = (
            Column("mark", "float64", f"1 if {self.program} passes all tests, 0 if not"),
            Column(
                "test_result",
                "string",
                "passed, wrong, timeout, crash or forbidden; null if there is no program",
            ),
            Column("test_detail", "string", "where and how the program failed; null if it passed"),
        )
        return tuple(Column(self.prefix + c.name, c.kind, c.meaning) for c in columns)

    @property
    def field_names(self) -> tuple[str, ...]:
        return (*self.tests, *(() if self.function is None else (self.function,)))

    @property
    def value_names(self) -> tuple[str, ...]:
        return (self.program,)

    @property
    def most_seconds(self) -> float:
        """The longest time of `apply` in seconds. It ends programs that take longer than
        `total_seconds`; 10 s are for the start and end of sandboxes."""
        return self.total_seconds + 10

    def check_machine(self) -> None:
        """Check that programs can be run safely on this machine.

        Raises:
            ConfigError: they cannot.
        """
        check_sandbox(self._sandbox.interpreter)

    def prepare(self) -> None:
        assert self._sandbox  # its first use looks for the interpreter and its packages

    @cached_property
    def _sandbox(self) -> Sandbox:
        python = interpreter(self.python, tuple(self.packages))
        return Sandbox(python, self.memory_mib << 20, self.seconds, self.total_seconds)

    def apply(self, row: AnswerRow) -> dict[str, Any]:
        program = row.values.get(self.program)
        tests = [_present(row.fields, name) for name in self.tests]
        name = None if self.function is None else _function_name(row.fields[self.function])
        values: tuple[float, str | None, str | None] = (0.0, None, "the answer has no program")
        if isinstance(program, str) and program.strip():
            source = f"{self.prelude}\n{textwrap.dedent(program)}\n"
            result = self._cached_result(source, tests, name)
            values = (float(result.outcome == "passed"), result.outcome, result.detail)
        return {c.name: value for c, value in zip(self.columns, values, strict=True)}

    def _cached_result(self, program: str, tests: Sequence[Any], name: str | None) -> ProgramResult:
        """The result of a program, from the cache or by running it."""
        limits = (self.seconds, self.total_seconds, self.memory_mib, self.version)
        question = json.dumps([tests, name, self.method])
        key = result_key([program, question, self._sandbox.interpreter.name, *limits])
        known = KnownResults()
        if (known_result := known.get(key)) is not None:
            return known_result
        try:
            result = self._run(program, tests, name)
        except UnfitTests as error:
            raise GradeFailure("bad_target", str(error)) from None
        except SandboxError as error:
            raise GradeFailure("failed", str(error)) from None
        known.put(key, result)
        return result

    def _run(self, program: str, tests: Sequence[Any], name: str | None) -> ProgramResult:
        """Run a program against the values of the columns with tests; `name` is the function's."""
        if self.method == "assert":
            return run_tests(self._sandbox, program, _code(tests, name))
        try:
            cases = [case for value in tests for case in read_cases(value)]
        except ValueError as error:
            raise GradeFailure("bad_target", f"column {', '.join(self.tests)}: {error}") from None
        if not cases:
            raise GradeFailure("no_target", f"column {', '.join(self.tests)} has no tests")
        # Cases that call a function run first, all in one program; then one program for each case
        # that reads standard input.
        calling = [case for case in cases if case.calls]
        if calling and name is None:
            raise GradeFailure("no_target", "the tests call a function whose name the row lacks")
        reading = [case for case in cases if not case.calls]
        deadline = time.monotonic() + self.total_seconds
        result = (
            self._run_calls(program, calling, name) if calling and name else ProgramResult("passed")
        )
        return (
            self._with_inputs(program, reading, deadline) if result.outcome == "passed" else result
        )

    def _run_calls(self, program: str, cases: Sequence[Case], name: str) -> ProgramResult:
        """Run cases that call a function, all in one sandbox."""
        seconds = min(self.seconds * len(cases), self.total_seconds)
        sandbox = replace(self._sandbox, seconds=seconds)
        return run_tests(sandbox, program, calling_tests(cases, name))

    def _with_inputs(self, program: str, cases: Sequence[Case], deadline: float) -> ProgramResult:
        """Run cases that read standard input, each in a new sandbox, up to the first failure."""
        for index, case in enumerate(cases):
            limit = max(_LEAST_OUTPUT, 4 * len(case.output))
            sandbox = replace(self._sandbox, wall_seconds=deadline - time.monotonic())
            output, failure = run_with_input(sandbox, program, case.input, limit)
            if failure is not None:
                return replace(failure, detail=f"case {index}: {failure.detail}")
            if not same_output(output, case.output):
                printed, wanted = output.strip(), case.output.strip()
                return ProgramResult(
                    "wrong", f"case {index}: {printed!r:.100} is not {wanted!r:.100}"
                )
        return ProgramResult("passed")


def _present(fields: Mapping[str, Any], name: str) -> Any:
    """The value of a column; GradeFailure if the row has none."""
    if (value := fields.get(name)) is None:
        raise GradeFailure("no_target", f"the row has no value in column {name!r}")
    return value


def _code(tests: Sequence[Any], name: str | None) -> str:
    """The code of the tests, from texts or lists of texts."""
    lines: list[str] = []
    for value in tests:
        lines += value if isinstance(value, list) else [value]
    if not all(isinstance(line, str) for line in lines):
        raise GradeFailure("bad_target", f"tests must be code, or a list of it, got {tests!r:.100}")
    code = "\n".join(lines)
    calls = name is None or re.search(r"^check\(", code, re.M)  # HumanEval+ on the hub has the call
    return code if calls else f"{code}\ncheck({name})"


def _function_name(value: Any) -> str | None:
    """The name of a function: a text, or `func_name` of an object in JSON; None without one."""
    if isinstance(value, str) and value.lstrip().startswith("{"):
        try:
            value = json.loads(value)
        except ValueError:
            raise GradeFailure("bad_target", f"not the name of a function: {value!r:.80}") from None
    name = value.get("func_name") if isinstance(value, Mapping) else value
    if name is not None and not (isinstance(name, str) and name.isidentifier()):
        raise GradeFailure("bad_target", f"not the name of a function: {name!r:.80}")
    return name
