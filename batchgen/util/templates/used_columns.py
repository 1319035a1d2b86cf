"""Finds the columns of the data set that a prompt uses, without importing the libraries that render
prompts."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from jinja2 import TemplateError, nodes

from batchgen.util.templates.template_sandbox import BoundedEnvironment

_TEMPLATES = ("system", "user", "text", "answer")
"""The keys of the group `prompt` whose value is one template."""
COLUMN_KEYS = (
    *("messages_column", "tools_column", "token_ids_column", "answer_ids_column"),
    *("answer_step_map_column", "body_column"),
)
"""The keys of the group `prompt` that name a column, except image_column."""


def used_columns(prompt: Mapping[str, Any]) -> list[str]:
    """Return the columns that the group `prompt` of a config.yaml uses, in order. A nested field
    counts as its column. A template that does not compile is ignored."""
    named = [name for _, source in prompt_templates(prompt) for name in _variables(source)]
    named += [column.split(".")[0] for key in COLUMN_KEYS if (column := prompt.get(key))]
    return list(dict.fromkeys(named))


def prompt_templates(prompt: Mapping[str, Any]) -> list[tuple[str, str]]:
    """Return (role or key, template) for each template of a group `prompt`, in the order of the
    prompt."""
    templates = [(key, prompt.get(key)) for key in _TEMPLATES]
    templates += [item for message in prompt.get("messages") or () for item in message.items()]
    return [(name, source) for name, source in templates if isinstance(source, str)]


def _variables(template: Any) -> list[str]:
    """Return the columns that a template reads, by their names or as fields of `row`."""
    if not isinstance(template, str):
        return []
    env = BoundedEnvironment()
    try:
        tree = env.parse(template)
    except TemplateError:
        return []
    free = env.undeclared(tree)
    names: list[str] = []
    for node in tree.find_all((nodes.Name, nodes.Getattr, nodes.Getitem)):
        if isinstance(node, nodes.Name):
            names += [node.name] * (node.name in free and node.name != "row")
        elif isinstance(node.node, nodes.Name) and node.node.name == "row":  # type: ignore[attr-defined]
            if isinstance(node, nodes.Getattr):
                names.append(node.attr)
            elif isinstance(node, nodes.Getitem) and isinstance(node.arg, nodes.Const):
                names.append(str(node.arg.value))
    return names
