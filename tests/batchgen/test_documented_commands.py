"""The commands of README.md and docs/usage.md are jobs and verbs that there are."""

from __future__ import annotations

import re
import shlex
from pathlib import Path

import pytest

from batchgen.command.options import parse_options
from batchgen.command.run import composed
from batchgen.command.verbs import VERBS

ROOT = Path(__file__).parents[2]
PAGES = ("README.md", "docs/usage.md")
FILES = {
    "job.yaml": "{}",
    "out/config.yaml": "{}",
    "prompt.jinja": "{{ order }}",
    "person.json": '{"type": "object"}',
}


def _commands() -> list[str]:
    found = []
    for page in PAGES:
        text = (ROOT / page).read_text(encoding="utf-8").replace("\\\n", " ")
        found += re.findall(r"^    (?:.*\| )?batchgen (.*)$", text, re.MULTILINE)
    return found


def test_there_are_commands() -> None:
    assert len(_commands()) > 30


@pytest.mark.parametrize("command", _commands())
def test_a_documented_command_is_understood(
    command: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    for name, content in FILES.items():
        Path(name).parent.mkdir(exist_ok=True)
        Path(name).write_text(content)
    arguments = shlex.split(command.partition(" > ")[0], comments=True)
    if arguments[0] in VERBS:
        return
    options = parse_options(arguments)
    if "--multirun" not in options.flags:
        composed(options)
