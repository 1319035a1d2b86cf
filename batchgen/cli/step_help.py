"""Writes the texts of `batchgen --help rows` and `--help post`: the built-in steps with their keys.
The texts are the steps' docstrings."""

from __future__ import annotations

import dataclasses
import inspect
import json
import re
from pkgutil import resolve_name
from typing import Any

from batchgen.config.groups.class_names import CLASSES, class_path

_ABOUT = {
    "rows": """\
rows: a list of steps that choose, split and join the rows of the data set, or add columns to them,
    before prompts are made. In a job file and on the command line:
        rows: [{Filter: {where: "language == 'en'"}}, {Explode: {column: questions, as: question}}]
        'rows=[{Filter: {where: "number > 3"}}, {Dedupe: {by: question}}]'
    What a step does with a row depends on this row and the rows before it, so a data set can grow
    at its end. In the output folder, rows/ says where each row comes from and which rows were taken
    out, and rows.json says how many rows were left after each step.
    A class of your own is named by `_target_`: [{_target_: package.module.Class, KEY: VALUE}]. It
    is derived from batchgen.TableStep, or has what batchgen.RowStep lists if it only adds columns.
    Where a file names it, it needs `--trust FILE`.""",
    "post": """\
post: a list of steps that make columns of a finished row, such as its mark, in their order.
    In a job file and on the command line:
        post: [{Extract: {methods: [boxed]}}, {Grade: {method: math}}]
        'post=[{Extract: {methods: [boxed]}}, {Grade: {method: math}}]'
    `batchgen grade OUT post=…` runs them over a finished job. A class of your own is named by
    `_target_`: [{_target_: package.module.Class, KEY: VALUE}]. It needs what batchgen.PostStep
    lists, and where a file names it, `--trust FILE`.""",
}


def steps_help(name: str) -> str:
    """Return what the list of steps `name` (`rows` or `post`) is for, and its steps with their keys
    and defaults."""
    return "\n\n".join([_ABOUT[name], *map(_step_help, CLASSES[name])])


def _step_help(name: str) -> str:
    """Return the help on one step, from the docstring of its class."""
    cls = resolve_name(class_path(name))
    about, _, attributes = inspect.cleandoc(cls.__doc__).partition("\nAttributes:\n")
    lines = [name]
    lines += [f"    {line}".rstrip() for line in about.rstrip().split("\n")]
    texts = _attribute_texts(attributes)
    for field in dataclasses.fields(cls):
        lines.append(f"  {field.name.rstrip('_')}: {_default(field)}")
        lines += [f"    {line}" for line in texts.get(field.name, ())]
    return "\n".join(lines)


def _attribute_texts(attributes: str) -> dict[str, list[str]]:
    """Parse the section `Attributes` of a docstring: each attribute's lines of text."""
    texts: dict[str, list[str]] = {}
    name = ""
    for line in attributes.split("\n"):
        if begins := re.match(r"    (\w+): (.*)", line):
            name = begins[1]
            texts[name] = [begins[2]]
        elif line.strip():
            texts[name].append(line.strip())
    return texts


def _default(field: dataclasses.Field[Any]) -> str:
    """Return the default of a field as JSON."""
    if field.default is dataclasses.MISSING:
        return "(has no default)"
    return json.dumps(field.default, ensure_ascii=False)
