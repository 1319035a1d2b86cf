"""Runs a program once in the sandbox and reports the result: with an input, or against testing
code."""

from __future__ import annotations

import contextlib
import json
import os
import selectors
import subprocess
import time
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Literal

from batchgen.evals.programs.sandbox import (
    FORBIDDEN,
    OVER_TIME,
    Sandbox,
    SandboxError,
    SandboxProcess,
    readable,
)

Outcome = Literal["passed", "wrong", "timeout", "crash", "forbidden"]
OUTCOMES = ("passed", "wrong", "timeout", "crash", "forbidden")
_MOST_ERRORS = 4096
"""The last bytes of standard error that are kept."""
# The most bytes of a verdict.
_MOST_VERDICT = 65_536


class UnfitTests(Exception):
    """The tests cannot be run here, which says nothing about the program."""


@dataclass(frozen=True, slots=True)
class ProgramResult:
    """The result of a program.

    Attributes:
        outcome: whether it passed, or the kind of failure.
        detail: where and how it failed.
    """

    outcome: Outcome
    detail: str | None = None


@dataclass
class _Pipe:
    """The open ends of a pipe, -1 for a closed one, and the content that was read so far."""

    read: int
    write: int
    content: bytes = b""

    def close_write(self) -> None:
        """Close the writing end here, which another process has."""
        os.close(self.write)
        self.write = -1


@contextlib.contextmanager
def _pipe() -> Iterator[_Pipe]:
    """A new pipe, whose open ends are closed at the end of the context."""
    pipe = _Pipe(*os.pipe())
    try:
        yield pipe
    finally:
        for end in (pipe.read, pipe.write):
            if end >= 0:
                os.close(end)


def run_with_input(
    sandbox: Sandbox, program: str, text: str, most_bytes: int
) -> tuple[str, ProgramResult | None]:
    """Run a program as a script with a standard input.

    Returns:
        Its output; and its failure, None if it ended by itself without an error. More output than
        `most_bytes` ends it.

    Raises:
        SandboxError: see `SandboxProcess.wait`.
    """
    with contextlib.ExitStack() as stack:
        stdin = stack.enter_context(readable(text))
        out, errors = stack.enter_context(_pipe()), stack.enter_context(_pipe())
        started = sandbox.process(
            "stdin_program",
            {"/program.py": program},
            stdin=stdin,
            stdout=out.write,
            stderr=errors.write,
        )
        process = stack.enter_context(started)
        out.close_write()
        errors.close_write()
        deadline = time.monotonic() + sandbox.wall_seconds
        in_time = _read([out, errors], deadline, most_bytes, kept=errors)
        if len(out.content) > most_bytes:
            return "", ProgramResult("crash", f"more than {most_bytes:,} bytes of output")
        if not in_time:
            return "", _over_time(sandbox)
        return out.content.decode(errors="replace"), _failure(process, errors.content, sandbox)


def run_tests(sandbox: Sandbox, program: str, tests: str) -> ProgramResult:
    """Run code that tests a program. Code and program run in two sandboxes, so that the program can
    neither read the tests nor write the verdict: it only answers calls.

    Raises:
        UnfitTests: the tests pass objects to the program that cannot be copied.
        SandboxError: see `SandboxProcess.wait`.
    """
    with contextlib.ExitStack() as stack:
        calls, answers, verdict = (stack.enter_context(_pipe()) for _ in range(3))
        tested = stack.enter_context(
            sandbox.process(
                "called_program",
                {"/program.py": program},
                stdin=calls.read,
                stdout=answers.write,
            )
        )
        tester = sandbox.process(
            "testing_code",
            {"/tests.py": tests},
            stdin=answers.read,
            stdout=calls.write,
            verdict=verdict.write,
        )
        testing = stack.enter_context(tester)
        for pipe in (calls, answers, verdict):
            pipe.close_write()
        deadline = time.monotonic() + sandbox.wall_seconds
        if not _read([verdict], deadline, _MOST_VERDICT):
            return _over_time(sandbox)
        if not verdict.content:  # they needed too much time or memory, with what they got
            return _failure(testing, b"", sandbox) or ProgramResult(
                "crash", "the tests have no verdict"
            )
        return _verdict(verdict.content, tested, sandbox)


def _verdict(content: bytes, tested: SandboxProcess, sandbox: Sandbox) -> ProgramResult:
    """The verdict of the testing code about a program."""
    kind, *texts = json.loads(content)
    text = texts[0] if texts else None
    if kind == "unsupported":
        raise UnfitTests(text)
    if kind == "lost":
        return _failure(tested, b"", sandbox) or ProgramResult(
            "crash", "it ended before its tests did"
        )
    outcomes: dict[str, Outcome] = {"passed": "passed", "wrong": "wrong"}
    return ProgramResult(outcomes.get(kind, "crash"), text)


def _read(pipes: list[_Pipe], deadline: float, most_bytes: int, kept: _Pipe | None = None) -> bool:
    """Read pipes to their ends; only the last bytes of `kept` are kept. Returns whether all ended
    in time and with at most `most_bytes` each."""
    with selectors.DefaultSelector() as selector:
        for each in pipes:
            selector.register(each.read, selectors.EVENT_READ, each)
        while selector.get_map():
            left = deadline - time.monotonic()
            if left <= 0:
                return False
            for key, _ in selector.select(left):
                pipe: _Pipe = key.data
                data = os.read(pipe.read, 1 << 16)
                pipe.content += data
                if not data:
                    selector.unregister(pipe.read)
                elif pipe is kept:
                    pipe.content = pipe.content[-_MOST_ERRORS:]
                elif len(pipe.content) > most_bytes:
                    return False
    return True


def _failure(process: SandboxProcess, errors: bytes, sandbox: Sandbox) -> ProgramResult | None:
    """How a program failed, by its exit code; None if it ended without an error."""
    try:
        code = process.wait()
    except subprocess.TimeoutExpired:
        return _over_time(sandbox)
    except SandboxError as error:
        raise SandboxError(f"{error}: {_last_line(errors)}") from None
    if code == FORBIDDEN:
        return ProgramResult("forbidden", "a system call that programs may not make")
    if code in OVER_TIME:
        return _over_time(sandbox)
    if code == 0:
        return None
    return ProgramResult("crash", _last_line(errors) or f"it ended with code {code}")


def _last_line(errors: bytes) -> str:
    return "".join(errors.decode(errors="replace").strip().splitlines()[-1:])[:500]


def _over_time(sandbox: Sandbox) -> ProgramResult:
    return ProgramResult(
        "timeout", f"longer than {sandbox.seconds:g} seconds of CPU or waiting time"
    )
