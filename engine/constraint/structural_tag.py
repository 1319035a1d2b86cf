"""Checks and rewrites structural tags, one kind of constraint. `Constraint.make` and
`xgrammar_input.py` call `lower_tag`.

A structural tag is xgrammar's description, in JSON, of free text with constrained parts, such as
tool calls. The parts are objects like `{"type": "json_schema", "json_schema": {…}}` or `{"type":
"regex", "pattern": "…"}` at any depth.
"""

from typing import Any

from batchgen.engine.constraint.json_schema.json_text import read_object
from batchgen.engine.constraint.json_schema.lower_schema import lower
from batchgen.engine.constraint.regex import regex_syntax as syntax
from batchgen.engine.constraint.regex import regex_text as text
from batchgen.engine.interface.constraint_error import ConstraintError

_JSON_FORMAT = {"type": "json_schema", "style": "json", "any_order": False, "excludes": []}
"""The only values that these members may have next to a `json_schema`. xgrammar supports other
styles of output, but nothing here checks that they follow the schema."""


def lower_tag(tag: Any) -> Any:
    """Check and rewrite every schema and pattern in a structural tag, so that xgrammar enforces it.

    JSON in a tag may have one whitespace character between tokens, or `max_whitespace_cnt`. Raises
    ConstraintError if a schema or a pattern cannot be enforced.
    """
    try:
        return _lowered(tag, "#")
    except RecursionError:
        raise ConstraintError("the structural tag is nested too deeply") from None


def _lowered(tag: Any, at: str) -> Any:
    """Return a part of a tag, rewritten. `at` is the part's JSON pointer."""
    if isinstance(tag, list):
        return [_lowered(part, f"{at}/{i}") for i, part in enumerate(tag)]
    if not isinstance(tag, dict):
        return tag
    if "json_schema" in tag:
        for name, only in _JSON_FORMAT.items():
            if tag.get(name, only) != only:
                raise ConstraintError(
                    f"`{name}` at {at} cannot be enforced: remove it, or make it {only!r}"
                )
        schema = read_object(tag["json_schema"], f"the schema at {at}")
        return {"max_whitespace_cnt": 1} | tag | {"json_schema": lower(schema, f"{at}/json_schema")}
    if tag.get("type") == "regex" and isinstance(tag.get("pattern"), str):
        try:
            return tag | {"pattern": text.write(syntax.parse(tag["pattern"]))}
        except ConstraintError as error:
            raise ConstraintError(f"{error} (at {at}/pattern)") from None
    return {name: _lowered(part, f"{at}/{name}") for name, part in tag.items()}
