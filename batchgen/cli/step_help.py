"""`batchgen --help rows` and `--help post`: the steps that come with batchgen, and their keys."""

from __future__ import annotations

import dataclasses
import inspect
import json
import re
from pkgutil import resolve_name
from typing import Any

STEPS = {
    "rows": ("batchgen.grading.choices.OrderChoices",),
    "post": (
        "batchgen.grading.extract.Extract",
        "batchgen.grading.grade.Grade",
        "batchgen.grading.parse_score.ParseScore",
    ),
}
"""List of steps → the import paths of those that come with batchgen."""
_ABOUT = {
    "rows": """\
rows: a list of steps that add columns to a row of the data set before its prompt is made.
    In a job file and on the command line:
        rows: [{_target_: batchgen.grading.choices.OrderChoices, KEY: VALUE}]
        'rows=[{_target_: batchgen.grading.choices.OrderChoices, KEY: VALUE}]'
    A class of your own needs what batchgen.grading.choices.RowStep lists, and where a file names
    it, `--trust FILE`.""",
    "post": """\
post: a list of steps that make columns of a finished row, such as its mark, in their order.
    In a job file and on the command line:
        post: [{_target_: batchgen.grading.extract.Extract, KEY: VALUE}]
        'post=[{_target_: batchgen.grading.extract.Extract, KEY: VALUE}]'
    `batchgen grade OUT post=…` runs them over a finished job. A class of your own needs what
    batchgen.grading.step.PostStep lists, and where a file names it, `--trust FILE`.""",
}


def steps_help(name: str) -> str:
    """What the list of steps `name` is, and its steps with their keys and defaults."""
    return "\n\n".join([_ABOUT[name], *map(_step_help, STEPS[name])])


def _step_help(target: str) -> str:
    cls = resolve_name(target)
    about, _, attributes = inspect.cleandoc(cls.__doc__).partition("\nAttributes:\n")
    lines = [f"_target_: {target}"]
    lines += [f"    {line}".rstrip() for line in about.rstrip().split("\n")]
    said = _said(attributes)
    for field in dataclasses.fields(cls):
        lines.append(f"  {field.name}: {_default(field)}")
        lines += [f"    {line}" for line in said.get(field.name, ())]
    return "\n".join(lines)


def _said(attributes: str) -> dict[str, list[str]]:
    """What a docstring says of each attribute, by lines."""
    found: dict[str, list[str]] = {}
    name = ""
    for line in attributes.split("\n"):
        if begins := re.match(r"    (\w+): (.*)", line):
            name = begins[1]
            found[name] = [begins[2]]
        elif line.strip():
            found[name].append(line.strip())
    return found


def _default(field: dataclasses.Field[Any]) -> str:
    if field.default is dataclasses.MISSING:
        return "(has no default)"
    return json.dumps(field.default, ensure_ascii=False)
