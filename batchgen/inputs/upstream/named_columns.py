"""Finds which columns of its rows a job reads, by the names in its configuration. `open_source`
uses it to read no more columns of other jobs than needed."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from jinja2 import TemplateError, nodes

from batchgen.config.groups.class_names import is_own
from batchgen.config.groups.prompt_config import TAIL_IDS_COLUMN, TAIL_STEP_MAP_COLUMN
from batchgen.util.templates.row_expression import fields_read
from batchgen.util.templates.template_sandbox import BoundedEnvironment

_GROUPS = ("rows", "prompt", "constraint", "sampling")
"""The configuration groups that use a row before its answer is written."""


def named_columns(groups: Mapping[str, Any]) -> frozenset[str] | None:
    """Return a superset of the columns that a job reads; None for all columns.

    Every variable of a template or expression counts, and so does every other text, as if it were a
    column's name (`a.b` also as `a`): the prompt `{{ question }}` and the option `by: topic` give
    `question` and `topic`. All columns are read if a template uses `row` as a whole, or if a step
    is the user's own class.

    Args:
        groups: the resolved configuration.
    """
    steps = [step for step in groups.get("rows") or () if "_target_" in step]
    if not all(is_own(str(step["_target_"])) for step in steps):
        return None
    env = BoundedEnvironment()
    names = set[str]()
    if (groups.get("prompt") or {}).get("answer_step_map_column") is not None:
        names |= {TAIL_IDS_COLUMN, TAIL_STEP_MAP_COLUMN}
    read = {name: groups.get(name) for name in _GROUPS}
    sampling = dict(read["sampling"] or {})
    sampling.pop("until", None)  # its expression reads only output columns
    read["sampling"] = sampling
    for text in _texts([_values(group) for group in read.values()]):
        names |= {text, text.partition(".")[0]}
        is_template = "{{" in text or "{%" in text
        try:
            tree = env.parse(text) if is_template else env.parse_expression(text, "_result")
        except TemplateError:
            continue
        names |= {node.name for node in tree.find_all(nodes.Name)}
        if any(node.name == "row" for node in tree.find_all(nodes.Name)):
            fields = fields_read(tree, "row")
            if fields is None:
                return None
            names |= fields
    return frozenset(names)


def _values(group: Any) -> list[Any]:
    """Return the values of a group or a list, without the group's keys."""
    return [*group.values()] if isinstance(group, Mapping) else [*(group or ())]


def _texts(value: Any) -> Iterator[str]:
    """Yield all texts inside of plain values, including the keys of mappings."""
    if isinstance(value, str):
        yield value
    elif isinstance(value, Mapping):
        for key, item in value.items():
            yield str(key)
            yield from _texts(item)
    elif isinstance(value, list | tuple):
        for item in value:
            yield from _texts(item)
