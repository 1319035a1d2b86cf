"""Turns a constraint into the arguments of xgrammar, so that it enforces what the user wrote.

xgrammar interprets some schemas and patterns differently from their standards. So they are
rewritten first (`json_schema/`, `regex/`, `structural_tag.py`).
"""

import json
from typing import Any

from batchgen.engine.constraint.constraint import MARKER_GAP, Constraint
from batchgen.engine.constraint.json_schema.json_text import WHITESPACE, compact_json
from batchgen.engine.constraint.json_schema.lower_schema import lower
from batchgen.engine.constraint.regex import regex_syntax as syntax
from batchgen.engine.constraint.regex import regex_text as text
from batchgen.engine.constraint.regex.characters import only
from batchgen.engine.constraint.structural_tag import lower_tag


def schema_arguments(constraint: Constraint) -> dict[str, Any]:
    """Return the arguments of xgrammar's `from_json_schema` and `compile_json_schema` for a
    constraint of kind `json_schema` or `json`, with the user's schema rewritten. With other
    arguments the output could be invalid."""
    schema = json.loads(constraint.text) if constraint.kind == "json_schema" else {"type": "object"}
    limit = constraint.max_whitespace
    return {
        "schema": compact_json(lower(schema)),
        "any_whitespace": limit > 0,
        "max_whitespace_cnt": limit or None,  # xgrammar reads it only where whitespace is allowed
        "separators": (",", ":"),
        "strict_mode": True,
    }


def regex_argument(constraint: Constraint) -> str:
    """Return the pattern of a `regex` constraint, rewritten so that xgrammar reads it as
    intended."""
    return text.write(syntax.parse(constraint.text))


def structural_tag_argument(constraint: Constraint) -> str:
    """Return the JSON text of a `structural_tag` constraint, with its schemas and patterns
    rewritten."""
    return compact_json(lower_tag(json.loads(constraint.text)))


def gap_argument() -> str:
    """Return the pattern of the whitespace that may come between a marker and the constrained
    text."""
    return text.write(syntax.Repeat(syntax.Chars(tuple(only(WHITESPACE))), 0, MARKER_GAP))


def to_grammar(constraint: Constraint) -> Any:
    """Return the `xgrammar.Grammar` of a constraint, without `start_after`. Raises RuntimeError or
    ValueError if xgrammar refuses it."""
    from xgrammar import Grammar

    match constraint.kind:
        case "json_schema" | "json":
            return Grammar.from_json_schema(**schema_arguments(constraint))
        case "regex":
            return Grammar.from_regex(regex_argument(constraint))
        case "grammar":
            return Grammar.from_ebnf(constraint.text)
        case "structural_tag":
            return Grammar.from_structural_tag(structural_tag_argument(constraint))
        case "choice":
            # EBNF strings have the same escapes as JSON strings.
            literals = (
                json.dumps(choice, ensure_ascii=False) for choice in json.loads(constraint.text)
            )
            return Grammar.from_ebnf("root ::= " + " | ".join(literals))
