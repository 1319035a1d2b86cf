"""Which columns of the data set a prompt is made of, found without the libraries that make it."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from jinja2 import TemplateError, nodes

from batchgen.templates.template_sandbox import BoundedEnvironment

_TEMPLATES = ("system", "user", "text")
_COLUMN_KEYS = ("messages_column", "token_ids_column")


def used_columns(prompt: Mapping[str, Any]) -> list[str]:
    """The columns that the group `prompt` of a config.yaml uses, in order; a nested field counts as
    its
    column. A template that does not compile names none."""
    named = [name for key in _TEMPLATES for name in _variables(prompt.get(key))]
    named += [column.split(".")[0] for key in _COLUMN_KEYS if (column := prompt.get(key))]
    return list(dict.fromkeys(named))


def _variables(template: Any) -> list[str]:
    """The columns that a template prints or tests, by their names or as fields of `row`."""
    if not isinstance(template, str):
        return []
    env = BoundedEnvironment()
    try:
        tree = env.parse(template)
    except TemplateError:
        return []
    free = env.undeclared(tree)
    found: list[str] = []
    for node in tree.find_all((nodes.Name, nodes.Getattr, nodes.Getitem)):
        if isinstance(node, nodes.Name):
            found += [node.name] * (node.name in free and node.name != "row")
        elif isinstance(node.node, nodes.Name) and node.node.name == "row":  # type: ignore[attr-defined]
            if isinstance(node, nodes.Getattr):
                found.append(node.attr)
            elif isinstance(node, nodes.Getitem) and isinstance(node.arg, nodes.Const):
                found.append(str(node.arg.value))
    return found
