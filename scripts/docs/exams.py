"""Generates docs/reference/exams.md, the page of the ready exams, for `reference.py`.

Its table comes from exams.yaml and from comments at the top of each exam's file in
conf/experiment/, which name the licence and the commands that make a local copy of the data.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from pathlib import Path

import yaml

_ABOUT = Path(__file__).with_name("exams.yaml")
_EXPERIMENTS = Path(__file__).parents[2] / "conf/experiment"
_LICENCE = re.compile(r"^# Licence: (?P<licence>.+?), (?P<gate>no gate|terms to accept)\b", re.M)
_COMMAND = re.compile(r"^#   ((?:hf download|curl|dataset=).+)$", re.M)
_HEAD = """# Ready exams

`batchgen +experiment=NAME model=hf model.path=…` runs one. Each file in `conf/experiment/` says
where its text comes from, with the commit. Ten invented rows of each exam are in
`tests/batchgen/evals/graders/exams/`, with the prompts that the definition's own format string
gives. This repository contains no real row, and none of the data sets could be run here: only
texts, rules and graders were compared.

| exam | data, rows | licence | gate | prompt | grader | checked against |
|---|---|---|---|---|---|---|"""
_NOTES = """\
`ruler` makes its rows with the step `Ruler`, from generated text only. So its two tasks over SQuAD
and HotpotQA, which ask about texts of these data sets, are left out.
Where the definition has essays and English words, it has sentences and words of our own, so that no
text is needed and no model has read it in training. Figures of these tasks cannot be compared with
published ones. `vt` is asked without the example that precedes it in the definition.

If a definition asks a second model about answers that its rule cannot read, such answers count as
wrong here.

## A local copy

The command that makes one, and the keys that read it:
"""


def exams_page() -> str:
    """Return the text of docs/reference/exams.md."""
    exams: Mapping[str, Mapping[str, str]] = yaml.safe_load(_ABOUT.read_text(encoding="utf-8"))
    files = {name: (_EXPERIMENTS / f"{name}.yaml").read_text(encoding="utf-8") for name in exams}
    table = [_row(name, exams[name], files[name]) for name in sorted(exams)]
    copies = [f"    {line}" for name in sorted(exams) for line in _copy(name, files[name])]
    return "\n".join([_HEAD, *table, "", _NOTES, *copies]) + "\n"


def _row(name: str, about: Mapping[str, str], file: str) -> str:
    """Return an exam's row of the table. `about` is its entry in exams.yaml, and `file` the text of
    its file. Raises ValueError if the file names no licence."""
    licence = _LICENCE.search(file)
    if licence is None:
        raise ValueError(f"conf/experiment/{name}.yaml: say '# Licence: NAME, no gate'")
    gate = "none" if licence["gate"] == "no gate" else licence["gate"]
    cells = [f"`{name}`", about["rows"], licence["licence"], gate]
    return f"| {' | '.join([*cells, about['prompt'], about['grader'], about['checked']])} |"


def _copy(name: str, file: str) -> list[str]:
    """Return the commands in an exam's file that make and use a local copy of its data, after a
    line with the exam's name; nothing if it has none."""
    commands = _COMMAND.findall(file)
    return [f"# {name}", *commands] if commands else []
