"""The table of commands: what one types, how it ends, and the very text that one sees.

Each file *.yaml in this folder is a list of cases:

    name: …          unique in its file
    thorough: true   for a case that takes long
    before: […]      commands that have to succeed first, with or without error rows
    command: …       as it is typed in bash; it begins with `batchgen`
    files: {…}       name → content of files in the case's own, otherwise empty working folder
    stdin: …
    code: 0          the exit code
    stdout: …        the whole text. In it, … stands for any characters of a line, and a line with
    stderr: …        nothing but ⋮ for any lines. A stream that is not named may say anything.

In the working folder `tiny` is a model with a tokenizer and a chat template, and `home` is $HOME.
Commands run in this process: one of its own would import torch for seconds.
"""

from __future__ import annotations

import io
import os
import re
import shlex
import sys
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import yaml

from batchgen.__main__ import run_command

KEYS = {"name", "thorough", "before", "command", "files", "stdin", "code", "stdout", "stderr"}


def _cases() -> list[Any]:
    found = []
    for file in sorted(Path(__file__).parent.glob("*.yaml")):
        cases = yaml.safe_load(file.read_text(encoding="utf-8"))
        names = [case["name"] for case in cases]
        assert len(set(names)) == len(names), f"{file.name} has a name twice"
        for case in cases:
            assert KEYS >= case.keys() >= {"command", "code"}, f"{file.name}: {case['name']}"
            marks = [pytest.mark.thorough] * case.get("thorough", False)
            found.append(pytest.param(case, id=f"{file.stem}: {case['name']}", marks=marks))
    return found


def test_the_table_is_there() -> None:
    assert _cases()


@pytest.mark.quick(3, thorough=60)
@pytest.mark.parametrize("case", _cases())
def test_command(
    case: dict[str, Any],
    model: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    home = tmp_path / "home"
    home.mkdir()
    (tmp_path / "tiny").symlink_to(model)
    for name, content in case.get("files", {}).items():
        path = tmp_path / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(content, encoding="utf-8", newline="")
    monkeypatch.chdir(tmp_path)
    with mock.patch.dict(os.environ, HOME=str(home), COLUMNS="100"):
        for command in case.get("before", ()):
            code = _run(command, "", monkeypatch)
            captured = capsys.readouterr()
            assert code in (0, 3), f"{command}\n{captured.out}{captured.err}"
        code = _run(case["command"], case.get("stdin", ""), monkeypatch)
    captured = capsys.readouterr()
    seen = f"exit code {code}\n--- stdout\n{captured.out}--- stderr\n{captured.err}"
    assert code == case["code"], seen
    for stream, text in (("stdout", captured.out), ("stderr", captured.err)):
        if stream in case:
            assert matches(case[stream], text), f"{stream} is another\n{seen}"


def _run(command: str, stdin: str, monkeypatch: pytest.MonkeyPatch) -> int:
    program, *arguments = shlex.split(command)
    assert program == "batchgen", command
    monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(stdin.encode()), "utf-8"))
    return run_command(arguments)


def matches(golden: str, text: str) -> bool:
    """Whether a text is the golden one, in which … and ⋮ stand for what may differ."""
    pattern = ""
    for line in golden.splitlines():
        pattern += r"(?:.*\n)*" if line == "⋮" else re.escape(line).replace("…", ".*") + r"\n"
    end = "" if text.endswith("\n") or not text else "\n"
    return re.fullmatch(pattern, text + end) is not None


@pytest.mark.parametrize(
    ("golden", "text", "same"),
    [
        ("", "", True),
        ("a (1)\n", "a (1)\n", True),
        ("a\n", "a", True),
        ("a\n", "a\nb\n", False),
        ("a … c\n", "a b c\n", True),
        ("a … c\n", "a\nc\n", False),
        ("⋮\nz\n", "x\ny\nz\n", True),
        ("⋮\nz\n", "z\n", True),
        ("⋮\nz\n", "z\ny\n", False),
    ],
)
def test_golden_texts(golden: str, text: str, same: bool) -> None:
    assert matches(golden, text) == same
