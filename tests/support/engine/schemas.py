"""JSON Schemas of many kinds that can be enforced, for every test that needs some."""

import random
from collections.abc import Callable
from typing import Any

TREE = {
    "type": "object",
    "properties": {
        "value": {"type": "integer", "minimum": 0, "maximum": 9},
        "children": {"type": "array", "items": {"$ref": "#"}, "maxItems": 2},
    },
    "required": ["value"],
}


def closed(**properties: Any) -> dict[str, Any]:
    """An object with all of these properties and no other."""
    return {
        "type": "object",
        "properties": properties,
        "required": list(properties),
        "additionalProperties": False,
    }


INTEGER, STRING, NULL = {"type": "integer"}, {"type": "string"}, {"type": "null"}

SCHEMAS: dict[str, Any] = {
    # Single values.
    "string": STRING,
    "boolean": {"type": "boolean"},
    "null": NULL,
    "integer": INTEGER,
    "number": {"type": "number"},
    "enum_strings": {"enum": ["red", "green", 'a "quoted" one', "", "ü/\\"]},
    "enum_mixed": {"enum": [1, 2.5, True, None, "x", [1, {"a": 0}], {"title": "t", "b": []}]},
    "enum_with_type": {"type": "string", "enum": ["a", 1, "b"]},
    "enum_with_rest": {"enum": [1, 5, 9, 12], "minimum": 5, "not": {"const": 9}},
    "const_object": {"const": {"b": 1, "a": [True, None]}},
    "const_string": {"const": "tab\there"},
    "type_list": {"type": ["string", "null"], "maxLength": 4},
    "type_list_bounds": {"type": ["integer", "string", "array"], "minimum": 5, "maxItems": 1},
    "any": {},
    "true": True,
    # Numbers.
    "integer_range": {"type": "integer", "minimum": -7, "maximum": 113},
    "integer_exclusive": {"type": "integer", "exclusiveMinimum": 0, "exclusiveMaximum": 10},
    "integer_half_open": {"type": "integer", "minimum": 18},
    "integer_fractional_bounds": {"type": "integer", "minimum": 1.5, "maximum": 4.5},
    "integer_both_bounds": {"type": "integer", "minimum": 3, "exclusiveMinimum": 3, "maximum": 6},
    "integer_multiple": {"type": "integer", "multipleOf": 7},
    "integer_multiple_range": {"type": "integer", "minimum": -20, "maximum": 20, "multipleOf": 6},
    "number_range": {"type": "number", "minimum": 0, "maximum": 1},
    "number_negative": {"type": "number", "minimum": -2.5, "maximum": -0.25},
    "number_exclusive": {"type": "number", "exclusiveMinimum": 0, "exclusiveMaximum": 0.5},
    "number_half_open": {"type": "number", "maximum": 99.95},
    "number_small": {"type": "number", "minimum": 0.001, "maximum": 0.0025},
    "number_whole_multiple": {"type": "number", "multipleOf": 5},
    "bounds_without_type": {"minimum": 10, "maximum": 20},
    # Strings.
    "length": {"type": "string", "minLength": 2, "maxLength": 5},
    "length_minimum": {"type": "string", "minLength": 3},
    "length_huge": {"type": "string", "maxLength": 2**40},
    "pattern": {"type": "string", "pattern": r"^[A-Z]{2}-\d{3}$"},
    "pattern_alternatives": {"type": "string", "pattern": "^(cat|dog)s?$|^fish$"},
    "pattern_escapes": {"type": "string", "pattern": r'^"[^"\\]{1,5}"\n\\$'},
    "pattern_class": {"type": "string", "pattern": r"^\S+\s\w+\W\D$"},
    "pattern_unicode": {"type": "string", "pattern": "^[à-ÿ]{1,3}€$"},
    "pattern_dots": {"type": "string", "pattern": "^.{1,8}$"},
    "pattern_with_length": {"type": "string", "pattern": "^[a-z]+$", "maxLength": 6},
    "pattern_part_with_length": {"type": "string", "pattern": "^id-[0-9]*$", "minLength": 5},
    **{
        f"format_{name}": {"type": "string", "format": name}
        for name in (
            *("date", "time", "date-time", "duration", "email"),
            *("hostname", "ipv4", "ipv6", "uri", "uuid"),
        )
    },
    # Arrays.
    "array": {"type": "array", "items": INTEGER, "maxItems": 4},
    "array_counts": {"type": "array", "items": {"type": "boolean"}, "minItems": 2, "maxItems": 3},
    "array_empty": {"type": "array", "maxItems": 0},
    "array_of_anything": {"type": "array", "minItems": 1, "maxItems": 2},
    "array_nested": {
        "type": "array",
        "items": {"type": "array", "items": {"type": "number"}, "maxItems": 2},
        "maxItems": 2,
    },
    "tuple": {"type": "array", "prefixItems": [INTEGER, STRING], "items": False, "minItems": 2},
    "tuple_and_more": {
        "type": "array",
        "prefixItems": [STRING],
        "items": NULL,
        "minItems": 1,
        "maxItems": 4,
    },
    "tuple_cut": {"prefixItems": [INTEGER, STRING, NULL], "maxItems": 2},
    "tuple_draft7": {
        "$schema": "http://json-schema.org/draft-07/schema#",
        "type": "array",
        "items": [INTEGER, {"type": "boolean"}],
        "additionalItems": False,
    },
    # Objects.
    "object": closed(name=STRING, age={"type": "integer", "minimum": 0, "maximum": 150}),
    "object_any": {"type": "object"},
    "object_empty": {"type": "object", "additionalProperties": False},
    "object_optional": {
        "type": "object",
        "properties": {"a": INTEGER, "b": {"type": "boolean"}, "c": NULL},
        "required": ["b"],
    },
    "object_all_optional": {"properties": {"a": INTEGER, "b": NULL}},
    "object_nested": closed(
        person=closed(name=STRING, address=closed(city=STRING, zip={"pattern": r"^\d{5}$"})),
        tags={"type": "array", "items": {"enum": ["x", "y"]}, "maxItems": 2},
    ),
    "object_map": {"type": "object", "additionalProperties": {"type": "integer"}},
    "object_and_more": {
        "type": "object",
        "properties": {"a": INTEGER, "ab": INTEGER},
        "required": ["a"],
        "additionalProperties": STRING,
    },
    "object_and_anything": {"properties": {"id": INTEGER}, "additionalProperties": True},
    "object_required_only": {"type": "object", "required": ["x", "y"]},
    "object_counts": {
        "type": "object",
        "properties": dict.fromkeys("abcd", NULL),
        "required": ["b"],
        "minProperties": 2,
        "maxProperties": 3,
    },
    "object_map_counts": {
        "type": "object",
        "additionalProperties": {"type": "boolean"},
        "minProperties": 1,
        "maxProperties": 2,
    },
    "object_patterns": {
        "type": "object",
        "patternProperties": {"^x_[a-z]{1,4}$": INTEGER},
        "additionalProperties": False,
    },
    "object_patterns_and_names": {
        "type": "object",
        "properties": {"id": STRING},
        "required": ["id"],
        "patternProperties": {"^x_": INTEGER},
    },
    "object_names_enum": {
        "type": "object",
        "propertyNames": {"enum": ["en", "de"]},
        "additionalProperties": STRING,
    },
    "object_names_pattern": {
        "type": "object",
        "propertyNames": {"pattern": "^[a-z]{2}$"},
        "additionalProperties": INTEGER,
    },
    "object_odd_names": closed(**{'quo"te': NULL, "back\\slash/": NULL, "ü\n": NULL}),
    # xgrammar would take the two for one schema: they differ in a property called "title" only.
    "object_titles": closed(
        book=closed(title=STRING, year=INTEGER), chapter=closed(title=INTEGER, year=INTEGER)
    ),
    "annotations": {
        "$schema": "https://json-schema.org/draft/2020-12/schema",
        "$id": "https://example.org/a",
        "title": "A",
        "description": "d",
        "x-order": 1,
        **closed(a={"type": "integer", "default": 1, "examples": [2], "deprecated": True}),
    },
    # Combinations.
    "any_of": {"anyOf": [INTEGER, {"type": "string", "maxLength": 3}, NULL]},
    "any_of_objects": {"anyOf": [closed(cat=STRING), closed(dog=INTEGER)]},
    "any_of_required": {
        "type": "object",
        "properties": {"mail": STRING, "phone": STRING},
        "anyOf": [{"required": ["mail"]}, {"required": ["phone"]}],
    },
    "one_of_types": {"oneOf": [{"type": "array", "items": INTEGER}, STRING, INTEGER]},
    "one_of_tagged": {
        "oneOf": [
            closed(kind={"const": "circle"}, radius={"type": "number", "exclusiveMinimum": 0}),
            closed(kind={"const": "square"}, side={"type": "integer", "minimum": 1}),
        ]
    },
    "one_of_references": {
        "oneOf": [{"$ref": "#/$defs/a"}, {"$ref": "#/$defs/b"}],
        "$defs": {"a": closed(t={"enum": ["a"]}), "b": closed(t={"enum": ["b", "c"]}, n=INTEGER)},
    },
    "all_of": {
        "allOf": [
            {"type": "object", "properties": {"a": INTEGER}, "required": ["a"]},
            {"properties": {"b": STRING, "a": {"minimum": 3, "maximum": 8}}, "required": ["b"]},
        ]
    },
    "all_of_bounds": {"allOf": [{"type": "integer", "maximum": 5}, {"minimum": 2, "maximum": 9}]},
    "all_of_single": {"allOf": [{"type": "integer"}], "title": "one"},
    "all_of_unevaluated": {
        "allOf": [{"properties": {"a": INTEGER}}, {"properties": {"b": NULL}}],
        "required": ["b"],
        "unevaluatedProperties": False,
    },
    # References.
    "reference": {
        "type": "object",
        "properties": {"from": {"$ref": "#/$defs/point"}, "to": {"$ref": "#/$defs/point"}},
        "required": ["from", "to"],
        "$defs": {"point": closed(x=INTEGER, y=INTEGER)},
    },
    "reference_definitions": {
        "items": {"$ref": "#/definitions/a~1b%20c"},
        "maxItems": 2,
        "definitions": {"a/b c": {"enum": ["ok"]}},
    },
    "reference_with_siblings": {
        "properties": {"n": {"$ref": "#/$defs/n", "maximum": 5, "description": "small"}},
        "required": ["n"],
        "$defs": {"n": {"type": "integer", "minimum": 0}},
    },
    "reference_to_property": {
        "properties": {"a": {"type": "boolean"}, "b": {"$ref": "#/properties/a"}},
        "required": ["a", "b"],
    },
    "recursion_root": TREE,
    "recursion_list": {
        "$ref": "#/$defs/node",
        "$defs": {
            "node": closed(v=INTEGER, next={"anyOf": [{"$ref": "#/$defs/node"}, NULL]}),
        },
    },
    "recursion_mutual": {
        "$ref": "#/$defs/a",
        "$defs": {
            "a": {"type": "array", "items": {"$ref": "#/$defs/b"}, "maxItems": 2},
            "b": {"properties": {"a": {"$ref": "#/$defs/a"}}},
        },
    },
}

# Of some, values that must be let through, and values that must not.
INSTANCES: dict[str, tuple[list[Any], list[Any]]] = {
    "enum_with_type": (["a", "b"], [1, "c"]),
    "enum_with_rest": ([5, 12], [1, 9]),
    "enum_mixed": ([1, 2.5, True, None, [1, {"a": 0}], {"title": "t", "b": []}], [0, False, []]),
    "type_list": (["", "abcd", None], ["abcde", 1]),
    "type_list_bounds": ([5, "", [], [1]], [4, [1, 2], None]),
    "any": ([1, None, {"a": [1, "b", {"c": 1.5}]}, []], []),
    "integer_range": ([-7, 0, 113], [-8, 114, 1.5]),
    "integer_exclusive": ([1, 9], [0, 10]),
    "integer_fractional_bounds": ([2, 4], [1, 5]),
    "integer_both_bounds": ([4, 6], [3, 7]),
    "integer_multiple": ([0, 7, -14, 700], [1, -13]),
    "integer_multiple_range": ([-18, 0, 18], [-20, 20, 5]),
    "number_range": ([0, 1, 0.25, 0.999999], [1.5, -0.5, 2]),
    "number_exclusive": ([0.25, 0.499], [0, 0.5]),
    "number_negative": ([-2.5, -1, -0.25], [0, -2.6, -0.2]),
    "length": (["ab", "éé😀"], ["a", "abcdef"]),
    "pattern": (["AB-123"], ["AB-12", "xAB-123", ""]),
    "pattern_alternatives": (["cat", "dogs", "fish"], ["catfish", "fishs"]),
    "pattern_escapes": (['"abc"\n\\'], ['"a"b"\n\\', "abc"]),
    "pattern_unicode": (["é€", "ààà€"], ["e€", "éééé€"]),
    "pattern_with_length": (["a", "abcdef"], ["", "abcdefg"]),
    "pattern_part_with_length": (["id-12", "id-123456"], ["id-1", "id-"]),
    "format_date": (["2024-02-28", "1999-12-31"], ["2023-02-30", "1999-13-01", "0000-01-01"]),
    "format_date-time": (["2024-01-02T03:04:05Z"], ["2024-01-02", "2024-01-02T24:00:00Z"]),
    "format_ipv4": (["1.2.3.4", "255.255.255.255"], ["256.1.1.1", "01.2.3.4"]),
    "format_ipv6": (["::1", "2001:db8::1"], [":::", "1::2::3"]),
    "format_email": (["a.b+c@example.org"], ["a", "@b.c"]),
    "array_counts": ([[True, False], [True] * 3], [[True], [True] * 4]),
    "array_empty": ([[]], [[1]]),
    "tuple": ([[1, "a"]], [[1], [1, "a", 2], ["a", 1]]),
    "tuple_and_more": ([["a"], ["a", None, None, None]], [[], ["a", 1], ["a"] + [None] * 4]),
    "tuple_cut": ([[], [1], [1, "a"]], [[1, "a", None]]),
    "tuple_draft7": ([[], [1, True]], [[1, True, 1], [True]]),
    "object": ([{"name": "n", "age": 3}], [{"name": "n"}, {"name": "n", "age": 3, "x": 1}]),
    "object_optional": ([{"b": True}, {"a": 1, "b": False, "c": None}], [{"a": 1}, {"b": 1}]),
    "object_and_more": (
        [{"a": 1}, {"a": 1, "ab": 2, "abc": "x", "b": "y"}],
        [{"ab": 1}, {"a": 1, "b": 2}],
    ),
    "object_required_only": ([{"x": 1, "y": []}], [{"x": 1}]),
    "object_counts": (
        [{"a": None, "b": None}, {"b": None, "c": None, "d": None}],
        [{"b": None}, {"a": None, "c": None}, dict.fromkeys("abcd")],
    ),
    "object_map_counts": ([{"x": True}], [{}, dict.fromkeys("abc", True)]),
    "object_patterns": ([{}, {"x_a": 1, "x_b": 2}], [{"y": 1}, {"x_a": "1"}]),
    "object_names_enum": ([{"en": "a"}, {"en": "a", "de": "b"}], [{"fr": "a"}]),
    "object_odd_names": ([{'quo"te': None, "back\\slash/": None, "ü\n": None}], [{}]),
    "object_titles": (
        [{"book": {"title": "t", "year": 1}, "chapter": {"title": 2, "year": 1}}],
        [{"book": {"title": "t", "year": 1}, "chapter": {"title": "t", "year": 1}}],
    ),
    "any_of": ([1, "abc", None], ["abcd", True]),
    "any_of_required": ([{"mail": ""}, {"phone": ""}, {"mail": "", "phone": ""}], [{}]),
    "one_of_tagged": (
        [{"kind": "circle", "radius": 0.5}, {"kind": "square", "side": 1}],
        [{"kind": "circle", "side": 1}],
    ),
    "all_of": ([{"a": 3, "b": "x"}], [{"a": 2, "b": "x"}, {"a": 3}]),
    "all_of_bounds": ([2, 5], [1, 6]),
    "all_of_unevaluated": ([{"b": None}, {"a": 1, "b": None}], [{"a": 1}, {"b": None, "c": 1}]),
    "reference_definitions": ([[], ["ok", "ok"]], [["no"]]),
    "reference_with_siblings": ([{"n": 5}], [{"n": 6}, {"n": -1}, {}]),
    "reference_to_property": ([{"a": True, "b": False}], [{"a": True, "b": 1}]),
    "recursion_root": ([{"value": 1, "children": [{"value": 2}]}], [{"value": 1, "children": [1]}]),
    "recursion_list": ([{"v": 1, "next": {"v": 2, "next": None}}], [{"v": 1}]),
}


def random_schema(rng: random.Random, depth: int = 0) -> dict[str, Any]:
    """A small schema of keywords drawn at random; about a third of them cannot be enforced."""

    def below() -> Any:
        leaves: list[Any] = [INTEGER, STRING, {}, {"enum": [1, "a", True]}]
        return random_schema(rng, depth + 1) if depth < 3 else rng.choice(leaves)

    def some(least: int, most: int) -> list[Any]:
        return [below() for _ in range(rng.randint(least, most))]

    names = ["a", "b", "title", 'c"d']
    values: dict[str, Callable[[], Any]] = {
        "minimum": lambda: rng.choice([0, -3, 2.5, 0.125, -7.75, 100, 0.001]),
        "maximum": lambda: rng.choice([5, 10, 7.25, 0.3, -1, 123456.789]),
        "exclusiveMinimum": lambda: rng.choice([0, -3, 2.5, -0.001]),
        "exclusiveMaximum": lambda: rng.choice([5, 10, 3.5, 0]),
        "multipleOf": lambda: rng.choice([1, 2, 5]),
        "minLength": lambda: rng.randint(0, 3),
        "maxLength": lambda: rng.randint(1, 6),
        "pattern": lambda: rng.choice(["^a", "[a-c]+", "^[^x]*$", "a|b$", r"\w{2,4}", r"^.\s?.$"]),
        "format": lambda: rng.choice(["date", "uuid"]),
        "items": below,
        "prefixItems": lambda: some(1, 2),
        "minItems": lambda: rng.randint(0, 2),
        "maxItems": lambda: rng.randint(0, 3),
        "unevaluatedItems": lambda: rng.choice([False, below()]),
        "properties": lambda: {name: below() for name in rng.sample(names, rng.randint(1, 3))},
        "required": lambda: rng.sample(names, rng.randint(0, 2)),
        "additionalProperties": lambda: rng.choice([True, False, below()]),
        "unevaluatedProperties": lambda: rng.choice([True, False, below()]),
        "patternProperties": lambda: {rng.choice(["^x", "^[a-b]$", "title"]): below()},
        "propertyNames": lambda: rng.choice([{"pattern": "^[a-b]"}, {"enum": ["a", "q"]}]),
        "minProperties": lambda: rng.randint(0, 2),
        "maxProperties": lambda: rng.randint(0, 3),
        "anyOf": lambda: some(2, 2),
        "oneOf": lambda: some(2, 2),
        "allOf": lambda: some(1, 2),
        "$ref": lambda: rng.choice(["#", "#/$defs/x", "#/$defs/y"]),
        "enum": lambda: [1, "a", True, None, {"title": 1}, []],
        "const": lambda: rng.choice([1, "a", {"title": 2}]),
        "not": below,
        "uniqueItems": lambda: rng.choice([True, False]),
    }
    kinds: list[Any] = ["object", "object", "array", "string", "integer", "number"]
    kinds += [["string", "integer"], ["object", "null"], ["number", "array"]]
    schema = {"type": rng.choice(kinds)} if rng.random() < 0.75 else {}
    for keyword in rng.choices(list(values), k=rng.randint(0, 4)):
        schema[keyword] = values[keyword]()
    if depth == 0:
        schema["$defs"] = {"x": random_schema(rng, 2), "y": random_schema(rng, 2)}
    return schema
