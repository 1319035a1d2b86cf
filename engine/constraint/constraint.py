"""What a row's output must look like: checked when it is made, so that no run starts in vain."""

import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal, get_args

from batchgen.engine.constraint.regex import syntax as regex
from batchgen.engine.constraint.regex import text as regex_text

Kind = Literal["json_schema", "json", "regex", "choice", "grammar", "structural_tag"]


class ConstraintError(ValueError):
    """A constraint that cannot be kept: what is wrong with it, and what to do, for the user."""


@dataclass(frozen=True, slots=True)
class Constraint:
    """A constraint on the text of one row. Equal contents are equal, and compile once.

    Make one with `make`, which checks it.

    Attributes:
        kind: the language that `text` is written in.
        text: the JSON Schema as compact JSON text; empty for `json` (any object); the regular
            expression; a JSON array of strings (choice); EBNF (grammar); a structural tag as
            compact JSON text.
        max_whitespace: of JSON: 0 is compact, n allows up to n whitespace characters in a row
            between tokens.
        start_after: free text up to and including this marker comes first, the constraint holds
            behind it; empty: from the start.
    """

    kind: Kind
    text: str = ""
    max_whitespace: int = 0
    start_after: str = ""

    @classmethod
    def make(
        cls,
        kind: str,
        value: str | Mapping[str, Any] | Sequence[str] | None = None,
        *,
        max_whitespace: int = 0,
        start_after: str = "",
    ) -> "Constraint":
        """A checked constraint of what a user wrote.

        The order of properties in a schema is kept: it is the order of the output.

        Args:
            kind: one of `Kind`.
            value: json_schema and structural_tag: a mapping or its JSON text; json: None; regex
                and grammar: text; choice: strings.

        Raises:
            ConstraintError: the value cannot be enforced; names the reason and what to do.
        """
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
                text = _regex(value)
            case "choice":
                text = _choice(value)
            case "grammar":
                text = _text(value, "an EBNF grammar")
            case "structural_tag":
                text = _structural_tag(value)
            case _:
                raise ConstraintError(f"kind must be one of {get_args(Kind)}, got {kind!r}")
        return cls(kind, text, max_whitespace, start_after)


def schema_arguments(constraint: Constraint) -> dict[str, Any]:
    """The arguments of xgrammar's `compile_json_schema` for a `json_schema` or `json` constraint.

    The schema is the constraint's, rewritten in the part of JSON Schema that xgrammar enforces;
    with other arguments the output need not be valid.
    """
    from batchgen.engine.constraint.json_schema import lower as json_schema

    schema = json.loads(constraint.text) if constraint.kind == "json_schema" else {"type": "object"}
    count = constraint.max_whitespace
    return {
        "schema": _compact(json_schema.lower(schema)),
        "any_whitespace": count > 0,
        "max_whitespace_cnt": count or None,  # only read where whitespace is allowed
        "separators": (",", ":"),
        "strict_mode": True,
    }


def regex_argument(constraint: Constraint) -> str:
    """The pattern of a `regex` constraint as xgrammar's `compile_regex` reads it rightly."""
    return regex_text.write(regex.parse(constraint.text))


def structural_tag_argument(constraint: Constraint) -> str:
    """The tag of a `structural_tag` constraint for xgrammar, its schemas and patterns rewritten."""
    return _compact(_lower_tag(json.loads(constraint.text), "#"))


# What a structural tag may ask of its JSON: no other style is tested against its schema.
_JSON_FORMAT = {"type": "json_schema", "style": "json", "any_order": False, "excludes": []}


def _compact(value: Any) -> str:
    return json.dumps(value, ensure_ascii=False, separators=(",", ":"), allow_nan=False)


def _text(value: Any, what: str) -> str:
    if not isinstance(value, str) or not value.strip():
        raise ConstraintError(f"expected {what} as a non-empty string, got {value!r:.100}")
    return value


def _json_object(value: Any, what: str) -> Any:
    """The mapping or boolean of a value or its JSON text, with plain JSON in it."""
    if not isinstance(value, str | bool | Mapping):
        raise ConstraintError(f"{what} must be a mapping or its JSON text, got {value!r:.100}")
    try:
        # Both ways through text: a mapping may hold what JSON cannot.
        text = value if isinstance(value, str) else json.dumps(value, default=_plain)
        parsed = json.loads(
            text, parse_constant=_not_a_number, parse_float=_finite, object_pairs_hook=_unique
        )
    except RecursionError:
        raise ConstraintError(f"{what} is nested too deeply") from None
    except (TypeError, ValueError) as error:
        raise ConstraintError(f"{what} is not JSON: {error}") from None
    if not isinstance(parsed, dict | bool):
        raise ConstraintError(f"{what} must be a JSON object, got {parsed!r:.100}")
    return parsed


def _plain(value: Any) -> Any:
    """Mappings and sequences of other libraries (Hydra's, for one) as JSON's own."""
    if isinstance(value, Mapping):
        return dict(value)
    if isinstance(value, Sequence):
        return list(value)
    raise TypeError(f"{type(value).__name__} is not a JSON value")


def _finite(digits: str) -> float:
    if math.isinf(value := float(digits)):
        raise ValueError(f"the number {digits:.40} is too large")
    return value


def _not_a_number(name: str) -> None:
    raise ValueError(f"{name} is not a JSON number")


def _unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    """Of two members with one name most readers would drop one without a word."""
    members = dict(pairs)
    if len(members) < len(pairs):
        names = [name for name, _ in pairs]
        raise ValueError(f"the name {max(names, key=names.count)!r} stands twice in one object")
    return members


def _json_schema(value: Any) -> str:
    from batchgen.engine.constraint.json_schema import lower as json_schema

    schema = _json_object(value, "the JSON Schema")
    json_schema.check_schema(schema)
    return _compact(schema)


def _regex(value: Any) -> str:
    text = _text(value, "a regular expression")
    _parse_regex(text, "")
    return text


def _parse_regex(text: str, where: str) -> regex.Node:
    try:
        return regex.parse(text)
    except regex.RegexError as error:
        raise ConstraintError(f"{error}{where}") from None


def _choice(value: Any) -> str:
    if isinstance(value, str | Mapping) or not isinstance(value, Sequence) or not value:
        raise ConstraintError(f"choices must be a non-empty list of strings, got {value!r:.100}")
    for choice in value:
        if not isinstance(choice, str) or not choice:
            raise ConstraintError(f"a choice must be a non-empty string, got {choice!r}")
        if "\0" in choice or any("\ud800" <= char <= "\udfff" for char in choice):
            raise ConstraintError(f"the choice {choice!r} has a character that is not text")
    if len(set(value)) < len(value):
        raise ConstraintError(f"the choice {max(value, key=list(value).count)!r} stands twice")
    return _compact(list(value))


def _structural_tag(value: Any) -> str:
    tag = _json_object(value, "a structural tag")
    if not isinstance(tag, dict) or tag.get("type") != "structural_tag" or "format" not in tag:
        raise ConstraintError(
            'a structural tag is an object with "type": "structural_tag" and a "format"; tags and '
            'triggers go into a format of type "triggered_tags"'
        )
    _lower_tag(tag, "#")
    return _compact(tag)


def _lower_tag(tag: Any, at: str) -> Any:
    """A structural tag with every schema and pattern in it checked and rewritten.

    Its JSON is as compact as xgrammar makes it there, at most one whitespace character in a row,
    unless the tag says otherwise.
    """
    from batchgen.engine.constraint.json_schema import lower as json_schema

    if isinstance(tag, list):
        return [_lower_tag(part, f"{at}/{i}") for i, part in enumerate(tag)]
    if not isinstance(tag, dict):
        return tag
    if "json_schema" in tag:
        for name, plain in _JSON_FORMAT.items():
            if tag.get(name, plain) != plain:
                raise ConstraintError(
                    f"`{name}` at {at} cannot be enforced: remove it, or make it {plain!r}"
                )
        schema = _json_object(tag["json_schema"], f"the schema at {at}")
        lowered = json_schema.lower(schema, at + "/json_schema")
        return {"max_whitespace_cnt": 1} | tag | {"json_schema": lowered}
    if tag.get("type") == "regex" and isinstance(tag.get("pattern"), str):
        return tag | {
            "pattern": regex_text.write(_parse_regex(tag["pattern"], f" (at {at}/pattern)"))
        }
    return {name: _lower_tag(part, f"{at}/{name}") for name, part in tag.items()}
