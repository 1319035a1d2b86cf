"""What the grammar of a schema lets through is valid; what cannot be enforced is refused."""

import json
import random
import re
from collections.abc import Callable
from datetime import date, datetime, time
from functools import cache
from ipaddress import IPv4Address, IPv6Address
from typing import Any
from urllib.parse import urlsplit
from uuid import UUID

import pytest
import xgrammar

from batchgen.engine.constraint.constraint import Constraint
from batchgen.engine.constraint.json_schema.lower_schema import check_schema
from batchgen.engine.constraint.json_schema.validator import make_validator
from batchgen.engine.constraint.xgrammar_input import schema_arguments
from batchgen.engine.interface.constraint_error import ConstraintError
from tests.support.engine.schemas import INSTANCES, SCHEMAS, random_schema

EOS = 256
CLOSERS = frozenset(b'"]}')
STRINGS = re.compile(rb'"(\\.|[^"\\])*"', re.DOTALL)
WHITESPACE = re.compile(rb"[ \n\r\t]+")


@cache
def tokenizer() -> xgrammar.TokenizerInfo:
    """One token per byte, and EOS."""
    return xgrammar.TokenizerInfo([bytes([i]) for i in range(256)] + [b"</s>"], stop_token_ids=EOS)


def compile_schema(schema: Any, max_whitespace: int = 0) -> xgrammar.CompiledGrammar:
    constraint = Constraint.make("json_schema", schema, max_whitespace=max_whitespace)
    compiler = xgrammar.GrammarCompiler(tokenizer(), max_threads=1, cache_enabled=False)
    return compiler.compile_json_schema(**schema_arguments(constraint))


@cache
def compiled(name: str, max_whitespace: int = 0) -> xgrammar.CompiledGrammar:
    return compile_schema(SCHEMAS[name], max_whitespace)


def accepts(grammar: xgrammar.CompiledGrammar, text: str) -> bool:
    matcher = xgrammar.GrammarMatcher(grammar)
    return bool(matcher.accept_string(text)) and bool(matcher.accept_token(EOS))


def walk(grammar: xgrammar.CompiledGrammar, rng: random.Random, length: int = 150) -> bytes | None:
    """Random legal bytes until EOS; from `length` on, whatever brings the end nearer."""
    matcher = xgrammar.GrammarMatcher(grammar)
    mask = xgrammar.allocate_token_bitmask(1, 257)
    text = bytearray()
    for step in range(6 * length):
        matcher.fill_next_token_bitmask(mask)
        words = [int(word) & 0xFFFFFFFF for word in mask[0]]
        legal = [i for i in range(257) if words[i // 32] >> (i % 32) & 1]
        assert legal, bytes(text)
        late = rng.random() < step / length
        if EOS in legal and (late or rng.random() < 0.5):
            return bytes(text)
        closing = [token for token in legal if token in CLOSERS]
        plain = [token for token in legal if 0x20 < token < 0x7F]
        # Not only letters: control characters, escapes and bytes of UTF-8 must be right as well.
        weighted = closing if late and closing else plain if plain and rng.random() < 0.6 else legal
        token = rng.choice([t for t in weighted if t != EOS] or legal)
        if token == EOS:
            return bytes(text)
        assert matcher.accept_token(token)
        text.append(token)
    return None


@pytest.mark.quick(7)
@pytest.mark.parametrize("max_whitespace", [0, 2])
@pytest.mark.parametrize("name", SCHEMAS)
def test_what_the_grammar_lets_through_is_valid(name: str, max_whitespace: int) -> None:
    validator = make_validator(SCHEMAS[name])
    rng = random.Random(name)
    texts = [walk(compiled(name, max_whitespace), rng) for _ in range(10)]
    finished = [text for text in texts if text is not None]
    assert finished
    for text in finished:
        value = json.loads(text)
        errors = [error.message for error in validator.iter_errors(value)]
        assert not errors, (text, errors)
        outside = STRINGS.sub(b"s", text)
        runs = [len(run) for run in WHITESPACE.findall(outside)]
        assert max(runs, default=0) <= max_whitespace, text


@pytest.mark.quick(1)
@pytest.mark.parametrize("seed", range(4))
def test_random_schemas_are_refused_or_enforced(seed: int) -> None:
    accepted = 0
    for i in range(60):
        rng = random.Random(f"{seed} {i}")
        schema = random_schema(rng)
        try:
            check_schema(schema)
        except ConstraintError:
            continue
        accepted += 1
        grammar, validator = compile_schema(schema), make_validator(schema)
        for _ in range(3):
            text = walk(grammar, rng, 60)
            if text is not None:
                errors = [error.message for error in validator.iter_errors(json.loads(text))]
                assert not errors, (schema, text, errors)
    assert accepted >= 20


PARSERS: dict[str, Callable[[str], Any]] = {
    "date": date.fromisoformat,
    "time": time.fromisoformat,
    "date-time": datetime.fromisoformat,
    "ipv4": IPv4Address,
    "ipv6": IPv6Address,
    "uuid": UUID,
    "uri": lambda text: urlsplit(text).port,
}


@pytest.mark.quick(2)
@pytest.mark.parametrize("name", PARSERS)
def test_formats_parse(name: str) -> None:
    rng = random.Random(name)
    for _ in range(30):
        text = walk(compiled(f"format_{name}"), rng)
        if text is not None:
            PARSERS[name](json.loads(text))


@pytest.mark.quick(20)
@pytest.mark.parametrize("name", INSTANCES)
def test_instances(name: str) -> None:
    validator = make_validator(SCHEMAS[name])
    valid, invalid = INSTANCES[name]
    for value in valid:
        assert validator.is_valid(value), value
        text = json.dumps(value, ensure_ascii=False, separators=(",", ":"))
        assert accepts(compiled(name), text), text
        if "enum" not in SCHEMAS[name]:  # listed values are written compactly, always
            assert accepts(compiled(name, 1), json.dumps(value, ensure_ascii=False))
    for value in invalid:
        # `jsonschema` checks some formats only with packages that are not needed here.
        assert not validator.is_valid(value) or "format" in SCHEMAS[name], value
        assert not accepts(compiled(name), json.dumps(value, separators=(",", ":"))), value


OBJECT = {"type": "object"}
A: dict[str, Any] = {"properties": {"a": {}}}
# What must be refused, and what the message must name: the keyword and where it stands.
REFUSED: dict[str, tuple[Any, str]] = {
    "unique": (
        {"properties": {"t": {"type": "array", "uniqueItems": True}}},
        "uniqueItems` at #/properties/t ",
    ),
    "contains": ({"type": "array", "contains": {}}, "contains` at # "),
    "min_contains": ({"minContains": 1}, "minContains"),
    "not": ({"items": {"not": {"type": "string"}}}, "not` at #/items "),
    "if": ({"if": {}, "then": {}}, "if"),
    "then": ({"then": {}}, "then"),
    "dependent_required": ({"dependentRequired": {"a": ["b"]}}, "dependentRequired"),
    "dependent_schemas": ({"dependentSchemas": {"a": {}}}, "dependentSchemas"),
    "dependencies": ({"dependencies": {"a": ["b"]}}, "dependencies"),
    "anchor": ({"$defs": {"a": {"$anchor": "x"}}, "$ref": "#/$defs/a"}, "anchor` at #/$defs/a "),
    "reference_to_anchor": ({"$ref": "#x"}, "$ref"),
    "dynamic": ({"$dynamicRef": "#a"}, "$dynamicRef"),
    "remote": ({"$ref": "https://example.org/schema"}, "$ref"),
    "reference_to_nothing": ({"items": {"$ref": "#/$defs/none"}}, "$ref` at #/items "),
    "reference_to_no_schema": ({"$ref": "#/required", "required": []}, "$ref"),
    "reference_to_itself": ({"$ref": "#"}, "$ref"),
    "reference_in_circle": ({"anyOf": [{"type": "null"}, {"$ref": "#"}]}, "$ref"),
    "reference_circle_joined": (
        {"$ref": "#/$defs/a", "$defs": {"a": {"allOf": [{"$ref": "#/$defs/a"}, OBJECT]}}},
        "$ref` at #/$defs/a/allOf/0 ",
    ),
    "endless": ({"properties": {"a": {"$ref": "#"}}, "required": ["a"]}, "$ref` at # "),
    "endless_below": (
        {
            "properties": {"b": {"$ref": "#/$defs/b"}},
            "$defs": {"b": {"type": "array", "items": {"$ref": "#/$defs/b"}, "minItems": 1}},
        },
        "$ref` at #/$defs/b ",
    ),
    "inner_id": ({"items": {"$id": "https://example.org/b"}}, "$id` at #/items "),
    "content": ({"type": "string", "contentEncoding": "base64"}, "contentEncoding"),
    "nullable": ({"type": "string", "nullable": True}, "nullable"),
    "discriminator": ({"discriminator": {"propertyName": "t"}}, "discriminator"),
    "unknown": ({"properties": {"a": {"maxLenght": 3}}}, "maxLenght` at #/properties/a "),
    "unknown_hint": ({"proprties": {}}, "did you mean `properties`"),
    "unknown_beside_enum": ({"enum": [1], "colour": 1}, "colour"),
    "false": (False, "false` at # "),
    "false_property": ({"properties": {"a": False}}, "false` at #/properties/a "),
    "enum_emptied": ({"enum": [1, 2], "type": "string"}, "enum"),
    "const_emptied": ({"const": 1, "minimum": 2}, "const"),
    "enum_big_integer": ({"enum": [2**70]}, "enum"),
    "one_of_overlap": ({"oneOf": [{"type": "integer"}, {"type": "number"}]}, "oneOf` at # "),
    "one_of_objects": ({"oneOf": [A, {"properties": {"b": {}}}]}, "oneOf"),
    "one_of_optional_tag": (
        {
            "oneOf": [
                {
                    "type": "object",
                    "properties": {"t": {"const": tag}},
                    "additionalProperties": True,
                }
                for tag in "ab"
            ]
        },
        "oneOf",
    ),
    "all_of_types": ({"allOf": [{"type": "string"}, {"type": "null"}]}, "type"),
    "all_of_patterns": ({"allOf": [{"pattern": "a"}, {"pattern": "b"}]}, "pattern"),
    "all_of_closed": (
        {"allOf": [{**A, "additionalProperties": False}, {"properties": {"b": {}}}]},
        "allOf",
    ),
    "all_of_unevaluated": (
        {"allOf": [{"unevaluatedProperties": False}, {"additionalProperties": {}}]},
        "allOf",
    ),
    "all_of_tuple": ({"allOf": [{"items": {"type": "null"}}, {"prefixItems": [{}]}]}, "allOf"),
    "any_of_twice": ({"allOf": [{"anyOf": [{}, A]}, {"anyOf": [A, OBJECT]}]}, "anyOf"),
    "format_unknown": ({"type": "string", "format": "iri"}, "format"),
    "format_and_pattern": ({"format": "date", "pattern": "^2"}, "format"),
    "format_and_length": ({"format": "email", "maxLength": 5}, "maxLength"),
    "pattern_lookahead": ({"items": {"pattern": "^(?!x).*$"}}, "pattern` at #/items "),
    "pattern_back_reference": ({"pattern": r"(a)\1"}, "pattern"),
    "pattern_boundary": ({"pattern": r"\bword\b"}, "pattern"),
    "pattern_anchor_inside": ({"pattern": "a$b"}, "pattern"),
    "pattern_unicode_class": ({"pattern": r"\p{L}+"}, "pattern"),
    "pattern_control": ({"pattern": "\\x01"}, "pattern"),
    "pattern_and_length": ({"pattern": "^(ab)*$", "minLength": 3}, "minLength"),
    "length_empty": ({"type": "string", "minLength": 3, "maxLength": 2}, "minLength"),
    "length_huge": ({"type": "string", "minLength": 2**40}, "minLength"),
    "pattern_huge": ({"type": "string", "pattern": "a{0,9999999}"}, "pattern"),
    "items_huge": ({"type": "array", "minItems": 2**40}, "minItems"),
    "range_below_decimals": (
        {"type": "number", "exclusiveMinimum": 1e-7, "maximum": 2e-7},
        "minimum",
    ),
    "multiple_fraction": ({"type": "number", "multipleOf": 0.01}, "multipleOf"),
    "multiple_large": ({"type": "integer", "multipleOf": 5000}, "multipleOf"),
    "multiple_half_open": ({"type": "integer", "multipleOf": 5, "minimum": 3}, "multipleOf"),
    "multiple_wide": (
        {"type": "integer", "multipleOf": 2, "minimum": 0, "maximum": 10**6},
        "multipleOf",
    ),
    "bound_large": ({"type": "number", "maximum": 1e300}, "maximum"),
    "range_empty": ({"type": "integer", "minimum": 1.2, "maximum": 1.8}, "minimum"),
    "range_empty_number": ({"type": "number", "minimum": 1, "exclusiveMaximum": 1}, "minimum"),
    "items_few": ({"type": "array", "minItems": 3, "maxItems": 2}, "minItems"),
    "items_none": ({"prefixItems": [{}], "items": False, "minItems": 2}, "minItems"),
    "additional_items": (
        {"$schema": "http://json-schema.org/draft-07/schema#", "additionalItems": False},
        "additionalItems",
    ),
    "patterns_two": ({"patternProperties": {"^a": {}, "b$": OBJECT}}, "patternProperties"),
    "patterns_and_more": (
        {"patternProperties": {"^a": {}}, "additionalProperties": {}},
        "patternProperties",
    ),
    "patterns_and_name": ({**A, "patternProperties": {"^a": OBJECT}}, "patternProperties"),
    "required_closed": ({**A, "required": ["b"], "additionalProperties": False}, "required"),
    "names_length": ({"type": "object", "propertyNames": {"maxLength": 3}}, "propertyNames"),
    "names_and_properties": (
        {**A, "additionalProperties": {}, "propertyNames": {"pattern": "a"}},
        "propertyNames",
    ),
    "names_forbid": ({**A, "propertyNames": {"maxLength": 0}}, "propertyNames"),
    "min_properties_free": ({"type": "object", "minProperties": 2}, "minProperties"),
    "properties_none": ({**A, "minProperties": 2}, "minProperties"),
    "dialect": ({"$schema": "http://json-schema.org/draft-04/schema#"}, "$schema"),
    "dialect_unknown": ({"$schema": "https://example.org/mine"}, "$schema"),
    "invalid_type": ({"properties": {"a": {"type": "str"}}}, "#/properties/a/type"),
    "invalid_required": ({"required": "a"}, "#/required"),
    "ref_elsewhere_beside_const": ({"const": 1, "$ref": "https://example.org/x"}, "$ref"),
    "ref_to_nothing_beside_enum": ({"enum": [1], "$ref": "#/nowhere"}, "/nowhere"),
    "min_length_of_nothing": ({"minLength": 1, "maxLength": 0}, "1 is more than 0 characters"),
    "invalid_tuple": ({"items": [{"type": "null"}]}, "prefixItems"),
    "draft4_bound": ({"exclusiveMinimum": True}, "#/exclusiveMinimum"),
}


@pytest.mark.quick(25)
@pytest.mark.parametrize("name", REFUSED)
def test_what_cannot_be_enforced_is_refused_by_name(name: str) -> None:
    schema, named = REFUSED[name]
    with pytest.raises(ConstraintError) as error:
        check_schema(schema)
    assert named in str(error.value)


def test_deep_nesting_is_refused_not_a_crash() -> None:
    schema: Any = {"type": "null"}
    for _ in range(3000):
        schema = {"items": schema}
    with pytest.raises(ConstraintError, match="nested too deeply"):
        check_schema(schema)


def test_enum_members_named_like_annotations_stay_apart() -> None:
    """xgrammar would take the two lists for one, since they differ under "title" only."""
    schema = {"prefixItems": [{"const": {"title": 1}}, {"const": {"title": 2}}], "minItems": 2}
    grammar = compile_schema(schema)
    assert accepts(grammar, '[{"title":1},{"title":2}]')
    assert not accepts(grammar, '[{"title":1},{"title":1}]')


@pytest.mark.parametrize(
    ("schema", "text"),
    [
        ({"type": "string", "maxLength": 3}, '"\t"'),  # a raw control character is not JSON
        ({"type": "string", "pattern": "^[^a]$"}, '"\x01"'),
        # A name spelled with an escape is the same name, under the wrong schema.
        ({"properties": {"a": {"type": "null"}}, "additionalProperties": True}, r'{"\u0061":1}'),
        ({}, "[1, 2]"),  # not compact
    ],
)
def test_texts_that_xgrammar_by_itself_lets_through(schema: Any, text: str) -> None:
    arguments = schema_arguments(Constraint.make("json_schema", schema))
    compiler = xgrammar.GrammarCompiler(tokenizer(), max_threads=1)
    assert not accepts(compiler.compile_json_schema(**arguments), text)
    raw = arguments | {"schema": json.dumps(schema)}
    assert accepts(compiler.compile_json_schema(**raw), text) or "pattern" in schema
