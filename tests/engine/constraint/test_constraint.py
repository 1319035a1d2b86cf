"""Constraints are checked when they are made, and equal contents are equal."""

import itertools
import json
import re
import time
from types import MappingProxyType
from typing import Any

import jsonschema
import pytest
import xgrammar
from hypothesis import given
from hypothesis import strategies as st

from batchgen.engine.constraint.constraint import Constraint
from batchgen.engine.constraint.json_schema.json_text import equality_key
from batchgen.engine.constraint.xgrammar_input import (
    regex_argument,
    schema_arguments,
    structural_tag_argument,
)
from batchgen.engine.interface.constraint_error import ConstraintError

SCHEMA = {"type": "object", "properties": {"b": {"type": "integer"}, "a": {"type": "null"}}}


def accepts(grammar: xgrammar.Grammar, text: str) -> bool:
    info = xgrammar.TokenizerInfo([bytes([i]) for i in range(256)] + [b"</s>"], stop_token_ids=256)
    matcher = xgrammar.GrammarMatcher(xgrammar.GrammarCompiler(info).compile_grammar(grammar))
    return bool(matcher.accept_string(text)) and bool(matcher.accept_token(256))


def test_equal_contents_are_equal() -> None:
    spaced = Constraint.make("json_schema", json.dumps(SCHEMA, indent=2))
    mapping = Constraint.make("json_schema", MappingProxyType(SCHEMA))
    assert spaced == mapping and hash(spaced) == hash(mapping)
    assert Constraint.make("choice", ["a", "b"]) == Constraint.make("choice", ("a", "b"))
    assert Constraint.make("json_schema", SCHEMA, max_whitespace=1) != mapping
    assert Constraint.make("json_schema", SCHEMA, start_after="</think>") != mapping


def test_the_order_of_properties_is_kept() -> None:
    other = {**SCHEMA, "properties": dict(reversed(SCHEMA["properties"].items()))}  # type: ignore[attr-defined]
    assert Constraint.make("json_schema", SCHEMA) != Constraint.make("json_schema", other)
    arguments = schema_arguments(Constraint.make("json_schema", SCHEMA))
    assert list(json.loads(arguments["schema"])["properties"]) == ["b", "a"]


def test_the_text_is_the_users_own() -> None:
    """What comes out is checked against it, so nothing of it may be lost."""
    schema = {"title": "T", "anyOf": [{"const": "é"}, {"$ref": "#/$defs/x"}], "$defs": {"x": {}}}
    assert json.loads(Constraint.make("json_schema", schema).text) == schema
    assert Constraint.make("regex", "^a+?$").text == "^a+?$"


def nested(levels: int) -> Any:
    """A list in a list, so many levels deep."""
    return [nested(levels - 1)] if levels else []


WRONG: list[tuple[str, Any, str]] = [
    ("yaml", "a", "kind must be one of .*json_schema.*'yaml'"),
    ("json_schema", "{", "the JSON Schema is not JSON"),
    ("json_schema", {"type": "int"}, "#/type: 'int' is not one of"),
    ("json_schema", {"items": {"type": ["null", "x"]}}, "#/items/type/1: 'x' is not one of"),
    ("json_schema", "[1]", "must be a JSON object"),
    ("json_schema", None, "must be a mapping or its JSON text"),
    ("json_schema", {"const": float("nan")}, "NaN is not a JSON number"),
    ("json_schema", '{"const": 1e999}', "1e999 is too large"),
    ("json_schema", {"const": {1, 2}}, "set is not a JSON value"),
    ("json_schema", '{"type":"null","type":"string"}', "'type' appears twice"),
    ("json_schema", {"uniqueItems": True}, "`uniqueItems` at #"),
    ("json", {}, "for a schema use json_schema"),
    ("regex", "", "non-empty"),
    ("regex", None, "expected a regular expression"),
    ("regex", "(", "not a regular expression"),
    ("choice", [], "non-empty list"),
    ("choice", "abc", "non-empty list of strings"),
    ("choice", ["a", ""], "non-empty string, got ''"),
    ("choice", ["a", 1], "non-empty string, got 1"),
    ("choice", ["a", "b", "a"], "'a' appears twice"),
    ("choice", ["\ud800"], "not text"),
    ("grammar", "  ", "an EBNF grammar"),
    ("structural_tag", {"format": {}}, '"type": "structural_tag"'),
    ("structural_tag", {"type": "structural_tag"}, '"format"'),
    ("regex", "(" * 600 + "a" + ")" * 600, "nests 600 groups, and at most 100 are"),
    ("regex", "a" * 200_000, "200,000 characters, and at most 131,072"),
    ("json_schema", "[" * 200_000, "200,000 characters, and at most 131,072"),
    ("json_schema", '{"enum": [' + "[" * 60_000 + "]" * 60_000 + "]}", "nested too deeply"),
    ("json_schema", {"pattern": "(" * 600 + ")" * 600}, "nested too deeply"),
    ("structural_tag", {"type": "structural_tag", "format": nested(900)}, "nested too deeply"),
    ("choice", ["a", *map(str, range(50_000))], "characters, and at most 131,072"),
]


@pytest.mark.thorough
def test_references_that_double_are_refused() -> None:
    steps = {f"d{i}": {"allOf": [{"$ref": f"#/$defs/d{i + 1}"}] * 2} for i in range(60)}
    schema = {"$ref": "#/$defs/d0", "$defs": {**steps, "d60": {"type": "string"}}}
    with pytest.raises(ConstraintError, match="stands for more than 100,000 schemas"):
        Constraint.make("json_schema", schema)


def test_groups_that_stand_beside_each_other_are_no_nest() -> None:
    pattern = "(a)" * 300 + r"\(" * 300 + "[(]" * 300
    assert Constraint.make("regex", pattern).text == pattern


def test_values_of_an_enum_are_found_and_not_compared_one_by_one() -> None:
    """Comparing each with each takes minutes for so many."""
    started = time.process_time()
    Constraint.make("json_schema", {"enum": list(range(15_000))})
    Constraint.make(
        "json_schema", {"allOf": [{"enum": list(range(8000))}, {"enum": list(range(7000, 9000))}]}
    )
    with pytest.raises(ConstraintError, match="'1' appears twice"):
        Constraint.make("choice", [*map(str, range(15_000)), "1"])
    assert time.process_time() - started < 5


_JSON = st.recursive(
    st.sampled_from([None, True, False, 0, 1, 1.0, "", "1"]),
    lambda part: st.lists(part, max_size=2) | st.dictionaries(st.sampled_from("ab"), part),
    max_leaves=3,
)


@given(_JSON, _JSON)
def test_values_of_json_share_a_key_where_they_are_equal(a: Any, b: Any) -> None:
    equal = jsonschema.Draft202012Validator({"const": a}).is_valid(b)
    assert (equality_key(a) == equality_key(b)) == equal


@pytest.mark.parametrize(
    ("a", "b", "same"), [(1, 1.0, True), (1, True, False), ([1], [True], False), ([], {}, False)]
)
def test_equality_of_json_is_not_that_of_python(a: Any, b: Any, same: bool) -> None:
    assert (equality_key(a) == equality_key(b)) is same


@pytest.mark.parametrize(("kind", "value", "message"), WRONG)
def test_a_wrong_value_is_refused(kind: str, value: Any, message: str) -> None:
    with pytest.raises(ConstraintError, match=message):
        Constraint.make(kind, value)


def test_whitespace_is_for_json_and_counted() -> None:
    with pytest.raises(ConstraintError, match="max_whitespace is for JSON"):
        Constraint.make("regex", "a", max_whitespace=1)
    with pytest.raises(ConstraintError, match="at least 0, got -1"):
        Constraint.make("json", max_whitespace=-1)


def test_json_is_any_object() -> None:
    compact = schema_arguments(Constraint.make("json"))
    loose = schema_arguments(Constraint.make("json", max_whitespace=1))
    for arguments, text, legal in [
        (compact, '{"a":[1,{"b":null}],"c":-1.5e3}', True),
        (compact, '{"a": 1}', False),
        (compact, "[1]", False),
        (loose, '{ "a" : [ 1 , 2 ] }', True),
        (loose, '{  "a":1}', False),
    ]:
        assert accepts(xgrammar.Grammar.from_json_schema(**arguments), text) == legal, text


CHARACTERS = ["a", "b", "1", "-", '"', "\\", "\n", "é", " ", "٣", "😀", "/", "_", "\t", "\u00a0"]
TEXTS = ["".join(chars) for n in range(3) for chars in itertools.product(CHARACTERS, repeat=n)]
TEXTS += ["aaa", "aba", "abab", "---", "ababab", "aab-", "aa1é"]
# Patterns, and whether the grammar must take all that Python matches, or fewer: what the dialects
# of `\d` and the like do not share.
PATTERNS = [
    *("a|b", "^a|b$", "a{2}", "a{2,}", "(ab){2,3}", "(a|)", "(?:ab)+", "(?P<n>a)b", "a*?", "(a*)*"),
    *(".", "[^a]", r"[a\-z]", r"[\]a]", r"\x41|\u00e9", "é+", r'a"b|\\', r"\n|a", ".{0,300}"),
    *("[a-]", "a{0}", "()", "(()|a)b", "( )?a", '["\\\\]{1,2}', "(a|b){0,2}|-{3}", r"\S+\s?\S*"),
    *("[+--]", "[.$^]", r"\s", r"[^\s]", "^[^\\x00-`]$"),
]
NARROWER = [r"\d", r"\D", r"\w", r"\W", r"[^\d]", r"[\w-]", r"[^\W]"]


@pytest.mark.quick(19)
@pytest.mark.parametrize("pattern", PATTERNS + NARROWER)
@pytest.mark.parametrize("json_string", [False, True])
def test_patterns_match_what_python_matches(pattern: str, json_string: bool) -> None:
    if json_string:
        constraint = Constraint.make("json_schema", {"type": "string", "pattern": pattern})
        grammar = xgrammar.Grammar.from_json_schema(**schema_arguments(constraint))
    else:
        constraint = Constraint.make("regex", pattern)
        grammar = xgrammar.Grammar.from_regex(regex_argument(constraint))
    info = xgrammar.TokenizerInfo([bytes([i]) for i in range(256)] + [b"</s>"], stop_token_ids=256)
    compiled = xgrammar.GrammarCompiler(info, max_threads=1).compile_grammar(grammar)
    for text in TEXTS:
        matcher = xgrammar.GrammarMatcher(compiled)
        written = json.dumps(text, ensure_ascii=False) if json_string else text
        accepted = matcher.accept_string(written) and matcher.accept_token(256)
        matches = re.fullmatch(pattern, text) is not None
        escaped = json_string and written != f'"{text}"'  # left out where there is a choice
        if escaped or (pattern in NARROWER and not text.isascii()):
            assert matches or not accepted, text
        else:
            assert matches == accepted, text


UNENFORCEABLE = [
    *("a(?!b).", "(?=a)a", "(?<=b)a", "(?<!b)a", "(?i)a", r"(a)\1", r"\bfoo", "a$b", "a^b", "a*+"),
    *("[]a]", "[[:alpha:]]", "a{,2}", "{", r"\Aa", r"a\Z", r"\p{L}", "(?#c)a", "(a$|b)", "(?>a)"),
    *("(?<n>a)", r"[\b]", r"\0", r"\u{1F600}", "(?P<n>a)(?P=n)"),
]


@pytest.mark.filterwarnings("ignore:Possible nested set")
@pytest.mark.parametrize("pattern", UNENFORCEABLE)
def test_patterns_that_look_around_are_refused(pattern: str) -> None:
    with pytest.raises(ConstraintError, match=r"regular expression|at character"):
        Constraint.make("regex", pattern)


def tag(**content: Any) -> dict[str, Any]:
    inner = {"type": "tag", "begin": "<call>", "content": content, "end": "</call>"}
    tags = {"type": "triggered_tags", "triggers": ["<call>"], "tags": [inner]}
    return {"type": "structural_tag", "format": tags}


def test_schemas_in_structural_tags_are_checked_and_rewritten() -> None:
    schema = {"type": "object", "properties": {"n": {"type": "string", "maxLength": 2}}}
    constraint = Constraint.make("structural_tag", tag(type="json_schema", json_schema=schema))
    grammar = xgrammar.Grammar.from_structural_tag(structural_tag_argument(constraint))
    assert accepts(grammar, 'text <call>{"n":"ab"}</call> text')
    assert not accepts(grammar, 'text <call>{"n":"a\t"}</call>')
    assert not accepts(grammar, 'text <call>{   "n":"a"}</call>')
    at = "#/format/tags/0/content/json_schema/properties/n "
    with pytest.raises(ConstraintError, match=f"`contains` at {at}"):
        bad: Any = {"properties": {"n": {"contains": {}}}}
        Constraint.make("structural_tag", tag(type="json_schema", json_schema=bad))
    with pytest.raises(ConstraintError, match="`style` at"):
        Constraint.make(
            "structural_tag", tag(type="json_schema", json_schema=schema, style="qwen_xml")
        )


def test_patterns_in_structural_tags_are_checked() -> None:
    constraint = Constraint.make("structural_tag", tag(type="regex", pattern="[^`]b"))
    grammar = xgrammar.Grammar.from_structural_tag(structural_tag_argument(constraint))
    assert accepts(grammar, "<call>bb</call>")
    with pytest.raises(ConstraintError, match="at #/format/tags/0/content/pattern"):
        Constraint.make("structural_tag", tag(type="regex", pattern="(?!a)b"))
