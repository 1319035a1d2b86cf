"""Constraints of every kind for the answers to word problems, which check_constraint.py runs."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from typing import Any

JsonSchema = dict[str, Any]


def closed(optional: tuple[str, ...] = (), /, **properties: Any) -> JsonSchema:
    """Describe an object with these properties and no others; the optional ones may be absent."""
    return {
        "type": "object",
        "properties": properties,
        "required": [name for name in properties if name not in optional],
        "additionalProperties": False,
    }


def listed(items: Any, most: int, least: int = 0) -> JsonSchema:
    return {"type": "array", "items": items, "minItems": least, "maxItems": most}


def text(most: int, least: int = 1) -> JsonSchema:
    return {"type": "string", "minLength": least, "maxLength": most}


def whole(low: int, high: int) -> JsonSchema:
    return {"type": "integer", "minimum": low, "maximum": high}


def written(pattern: str) -> JsonSchema:
    return {"type": "string", "pattern": pattern}


def formatted(name: str) -> JsonSchema:
    return {"type": "string", "format": name}


STRING, INTEGER, NUMBER = {"type": "string"}, {"type": "integer"}, {"type": "number"}
BOOLEAN, NULL = {"type": "boolean"}, {"type": "null"}
WORD = written(r"^[A-Za-z]{2,12}$")
UNIT = {"enum": ["dollars", "hours", "eggs", "miles", "people", "other"]}
QUANTITY = closed(amount=NUMBER, unit=UNIT)
POINT = {"$defs": {"point": closed(x=whole(0, 99), y=whole(0, 99))}}
AT = {"$ref": "#/$defs/point"}
SUM = closed(op={"const": "sum"}, of=listed({"$ref": "#/$defs/term"}, 2, 1))

SCHEMAS: dict[str, tuple[Any, ...]] = {
    "values": (INTEGER, NUMBER, BOOLEAN, NULL, text(20), {"type": ["integer", "null"]}),
    "objects": (
        closed(answer=INTEGER),
        closed(reasoning=text(80), answer=NUMBER),
        closed(name=STRING, solved=BOOLEAN),
        {"type": "object", "properties": {"answer": INTEGER}, "required": ["answer"]},
    ),
    "nested": (
        closed(problem=closed(topic=WORD, answer=closed(value=NUMBER, unit=UNIT))),
        closed(a=closed(b=closed(c=closed(d=INTEGER)))),
        closed(people=listed(closed(name=WORD, owns=listed(QUANTITY, 1)), 2, 1)),
        closed(before=QUANTITY, after=QUANTITY),
    ),
    "arrays": (
        listed(INTEGER, 5),
        listed(WORD, 4, 2),
        listed(listed(whole(0, 9), 3, 1), 3, 1),
        closed(steps=listed(text(40), 3, 1), answer=INTEGER),
        {"type": "array", "items": BOOLEAN},
    ),
    "enums": (
        UNIT,
        closed(operation={"enum": ["add", "subtract", "multiply", "divide"]}, sure=BOOLEAN),
        {"enum": [1, 2.5, "many", None, False, ["a", {"b": 0}]]},
        closed(version={"const": 3}, level={"enum": ["easy", "hard", "très dur 😀"]}),
    ),
    "ranges": (
        whole(0, 1000),
        closed(percent={"type": "number", "minimum": 0, "maximum": 100}),
        closed(age=whole(18, 99), change={"type": "integer", "exclusiveMaximum": 0}),
        {"type": "number", "exclusiveMinimum": -1.5, "exclusiveMaximum": 0.25},
        {"type": "integer", "minimum": 0, "maximum": 100, "multipleOf": 5},
        closed(dozens={"type": "integer", "multipleOf": 12}),
    ),
    "patterns": (
        closed(price=written(r"^\$\d{1,4}\.\d{2}$")),
        closed(id=written(r"^[A-Z]{2}-\d{3}$"), answer=written("^(yes|no)$")),
        written(r"^\d+ [+*/-] \d+ = \d+$"),
        closed(path=written(r'^"\\[a-z]{1,4}"$'), accents=written("^[à-ÿ]{2,4}$")),
        written(r"^(the )?[a-z]{3,9}( [a-z]{3,9}){0,3}[.!?]$"),
    ),
    "lengths": (closed(short=text(8), long=text(60, 20)), listed(text(3, 3), 3, 3)),
    "optional": (
        closed(("unit", "note"), answer=INTEGER, unit=UNIT, note=text(30)),
        closed(("first", "second"), first=INTEGER, second=INTEGER),
        closed(("a", "c"), a=WORD, b=INTEGER, c=BOOLEAN, d=NULL),
        {"type": "object", "properties": {"a": NULL, "b": NULL, "c": NULL}, "minProperties": 2}
        | {"additionalProperties": False},
    ),
    "maps": (
        {"type": "object", "additionalProperties": INTEGER, "maxProperties": 3},
        {"propertyNames": {"enum": ["Monday", "Tuesday"]}, "additionalProperties": NUMBER}
        | {"type": "object"},
        {"type": "object", "patternProperties": {"^[a-z]{3,8}$": BOOLEAN}, "maxProperties": 3}
        | {"additionalProperties": False},
        closed(answer=INTEGER) | {"additionalProperties": text(9), "maxProperties": 3},
    ),
    "references": (
        closed(start=AT, end=AT) | POINT,
        listed(AT, 3, 1) | POINT,
        {"properties": {"n": {"$ref": "#/$defs/n", "maximum": 5}}, "required": ["n"]}
        | {"$defs": {"n": {"type": "integer", "minimum": 0}}},
        closed(a=WORD, b={"$ref": "#/properties/a"}),
    ),
    "unions": (
        {"anyOf": [INTEGER, text(10), NULL]},
        {"anyOf": [closed(eggs=INTEGER), closed(dollars=NUMBER)]},
        {"oneOf": [closed(kind={"const": "number"}, value=NUMBER)]}
        | {"anyOf": [closed(kind={"enum": ["number"]}, value=whole(0, 50))]},
        {
            "oneOf": [
                closed(kind={"const": "number"}, value=NUMBER),
                closed(kind={"const": "words"}, value=text(15), sure=BOOLEAN),
            ]
        },
        closed(answer={"type": ["number", "boolean"]}, why={"anyOf": [NULL, text(25)]}),
    ),
    "combined": (
        {"allOf": [closed(a=INTEGER, b=INTEGER), {"properties": {"a": whole(3, 8)}}]},
        {"allOf": [{"type": "integer", "maximum": 50}, {"minimum": 20, "maximum": 90}]},
        {"allOf": [{"properties": {"a": INTEGER}}, {"properties": {"b": NULL}}]}
        | {"type": "object", "required": ["a", "b"], "unevaluatedProperties": False},
    ),
    "recursion": (
        closed(("children",), value=whole(0, 9), children=listed({"$ref": "#"}, 2)),
        {"$ref": "#/$defs/node"}
        | {"$defs": {"node": closed(v=INTEGER, next={"anyOf": [NULL, {"$ref": "#/$defs/node"}]})}},
        {"$ref": "#/$defs/term", "$defs": {"term": {"anyOf": [whole(0, 99), SUM]}}},
        listed({"$ref": "#"}, 2),
    ),
    "formats": tuple(
        closed(value=formatted(name))
        for name in (
            *("date", "time", "date-time", "duration", "email"),
            *("hostname", "ipv4", "ipv6", "uri", "uuid"),
        )
    ),
    "tuples": (
        {"type": "array", "prefixItems": [WORD, whole(0, 9)], "items": False, "minItems": 2},
        {"type": "array", "prefixItems": [UNIT], "items": NUMBER, "minItems": 1, "maxItems": 4},
        {"$schema": "http://json-schema.org/draft-07/schema#", "type": "array"}
        | {"items": [INTEGER, BOOLEAN], "additionalItems": False},
        closed(pair={"type": "array", "prefixItems": [INTEGER, NULL], "minItems": 2}),
    ),
}

CALL = {
    "type": "tag",
    "begin": "<call>",
    "content": {"type": "json_schema", "json_schema": closed(add=listed(whole(0, 99), 2, 2))},
    "end": "</call>",
}

# The values of the configuration group `constraint` by kind, without the kind itself.
OTHERS: dict[str, tuple[dict[str, Any], ...]] = {
    "regex": (
        {"pattern": r"-?\d{1,6}(\.\d{1,2})?"},
        {"pattern": r"The answer is \$?\d+( (eggs|dollars|miles))?\."},
        {"pattern": r"[A-Z][a-z]+( [a-z]+){2,6}\."},
        {"pattern": r"(\d+ [+*-] )+\d+ = \d+"},
        {"pattern": "[a-e]{3}|[^\\n<]{10,40}!"},
    ),
    "choice": (
        {"choices": ["yes", "no"]},
        {"choices": ["more than ten", "more than twenty", "more", "ten"]},
        {"choices": ['"quoted"', "née 12", "数学", " leading space", "a\nb"]},
    ),
    "grammar": (
        {"grammar": 'root ::= sum "=" n\nsum ::= n | n [+*-] sum\nn ::= [0-9]{1,3}'},
        {"grammar": 'root ::= "(" root ")" root | "." | "x"'},
        {"grammar": 'root ::= line{1,3} "END"\nline ::= "- " [a-z ]{3,20} "\\n"'},
    ),
    "json": ({}, {"max_whitespace": 2}),
    "structural_tag": (
        {"tag": {"type": "structural_tag", "format": CALL}},
        {
            "tag": {
                "type": "structural_tag",
                "format": {"type": "triggered_tags", "triggers": ["<call>"], "tags": [CALL]},
            }
        },
    ),
    "whitespace": (
        {"kind": "json_schema", "schema": closed(name=WORD, answer=NUMBER), "max_whitespace": 1},
        {"kind": "json_schema", "schema": listed(INTEGER, 4, 2), "max_whitespace": 3},
    ),
    # The markers are texts that the model writes by itself sooner or later.
    "start_after": (
        {"kind": "json_schema", "schema": closed(answer=INTEGER), "start_after": "."},
        {"kind": "regex", "pattern": r"#### \d+", "start_after": "\n"},
        {"kind": "choice", "choices": ["yes", "no"], "start_after": " is"},
        {"kind": "json_schema", "schema": listed(WORD, 2, 1), "start_after": " the "},
    ),
}


def constraints() -> Iterator[tuple[str, dict[str, Any]]]:
    """Yield every constraint: its name in the summary, and the values of the group `constraint`."""
    for name, schemas in SCHEMAS.items():
        for schema in schemas:
            yield name, {"kind": "json_schema", "schema": schema}
    for name, values in OTHERS.items():
        yield from zip(itertools.repeat(name), ({"kind": name} | value for value in values))


NUM_SCHEMAS = sum(map(len, SCHEMAS.values()))
