"""Constraints on the text of a row: a JSON Schema, a regular expression, a list of choices, a
grammar, or a structural tag.

`Constraint.make` checks a constraint, so that a job with an invalid one fails before it starts. A
*marker* is a text such as "</think>" after which the constrained text begins.
"""

from collections import abc
from dataclasses import dataclass
from typing import Any, Literal, get_args

from batchgen.engine.constraint.json_schema.json_text import (
    compact_json,
    first_repeated,
    has_lone_surrogate,
    read_object,
)
from batchgen.engine.constraint.json_schema.lower_schema import check_schema
from batchgen.engine.constraint.regex import regex_syntax as syntax
from batchgen.engine.constraint.structural_tag import lower_tag
from batchgen.engine.interface.constraint_error import ConstraintError

Kind = Literal["json_schema", "json", "regex", "choice", "grammar", "structural_tag"]

_MOST_TEXT = 2**17
"""The most characters of a constraint. A string of a million would compile for 18 s and take 200
MB."""
MARKER_GAP = 4
"""The most JSON whitespace characters between the marker `start_after` and the constrained text.
Models write two newlines after "</think>"."""


@dataclass(frozen=True, slots=True)
class Constraint:
    """A rule for the text of one row. Constraints with equal contents are equal, and compiled once.

    `make` creates one from what a user wrote, and checks it; the constructor checks nothing.

    `text` is compact JSON for `json_schema` and `structural_tag`, empty for `json` (any JSON
    object), the expression for `regex`, a JSON array of strings for `choice`, and the EBNF for
    `grammar`. `max_whitespace` limits whitespace in a row between two JSON tokens; 0 asks for
    compact JSON. The row begins with free text up to the first `start_after`, such as "</think>",
    if that is given.
    """

    kind: Kind
    text: str = ""
    max_whitespace: int = 0
    start_after: str = ""

    @classmethod
    def make(
        cls,
        kind: str,
        value: str | abc.Mapping[str, Any] | abc.Sequence[str] | None = None,
        *,
        max_whitespace: int = 0,
        start_after: str = "",
    ) -> "Constraint":
        """Check what a user wrote, and make a constraint from it.

        Args:
            value: a mapping or its JSON text for `json_schema` and `structural_tag`, text for
                `regex` and `grammar`, a list of strings for `choice`, None for `json`. A schema's
                properties keep their order, because the output has them in that order.

        Raises:
            ConstraintError: it cannot be enforced; the message says why and what to do.
        """
        if isinstance(value, str):
            _check_length(kind, value)
        if max_whitespace < 0:
            raise ConstraintError(f"max_whitespace must be at least 0, got {max_whitespace}")
        if max_whitespace and kind not in ("json_schema", "json"):
            raise ConstraintError(f"max_whitespace is for JSON; with {kind} it must be 0")
        match kind:
            case "json_schema":
                text = _json_schema(value)
            case "json":
                if value is not None:
                    raise ConstraintError("json is any JSON object; for a schema use json_schema")
                text = ""
            case "regex":
                text = _text(value, "a regular expression")
                syntax.parse(text)
            case "choice":
                text = _choice(value)
            case "grammar":
                text = _text(value, "an EBNF grammar")
            case "structural_tag":
                text = _structural_tag(value)
            case _:
                raise ConstraintError(f"kind must be one of {get_args(Kind)}, got {kind!r}")
        return cls(kind, text, max_whitespace, start_after)


def _check_length(kind: str, text: str) -> None:
    if len(text) > _MOST_TEXT:
        raise ConstraintError(
            f"the {kind} constraint has {len(text):,} characters, and at most {_MOST_TEXT:,} "
            "compile in seconds: split or shorten it"
        )


def _text(value: Any, what: str) -> str:
    if not isinstance(value, str) or not value.strip():
        raise ConstraintError(f"expected {what} as a non-empty string, got {value!r:.100}")
    return value


def _json_schema(value: Any) -> str:
    schema = read_object(value, "the JSON Schema")
    text = compact_json(schema)
    _check_length("json_schema", text)
    check_schema(schema)
    return text


def _choice(value: Any) -> str:
    if isinstance(value, str) or not isinstance(value, abc.Sequence) or not value:
        raise ConstraintError(f"choices must be a non-empty list of strings, got {value!r:.100}")
    for choice in value:
        if not isinstance(choice, str) or not choice:
            raise ConstraintError(f"a choice must be a non-empty string, got {choice!r}")
        if "\0" in choice or has_lone_surrogate(choice):
            raise ConstraintError(f"the choice {choice!r} has a character that is not text")
    if (twice := first_repeated(value)) is not None:
        raise ConstraintError(f"the choice {twice!r:.100} appears twice")
    text = compact_json(list(value))
    _check_length("choice", text)
    return text


def _structural_tag(value: Any) -> str:
    tag = read_object(value, "a structural tag")
    if not isinstance(tag, dict) or tag.get("type") != "structural_tag" or "format" not in tag:
        raise ConstraintError(
            'a structural tag is an object with "type": "structural_tag" and a "format"; tags and '
            'triggers go into a format of type "triggered_tags"'
        )
    text = compact_json(tag)
    _check_length("structural_tag", text)
    lower_tag(tag)
    return text
