"""The column `parsed`: which schemas have an Arrow type, and that no value ever kills a job."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import datasets
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from batchgen.engine.constraint.constraint import Constraint
from batchgen.engine.interface.outputs import RequestError, RequestOutput
from batchgen.storage.shards.arrow_schema import Inexact, arrow_type
from batchgen.storage.shards.parsed_column import ParsedColumn
from tests.support.jobs.fake_job import FakeJob

STRING, INT, FLOAT, BOOL = pa.string(), pa.int64(), pa.float64(), pa.bool_()


def closed(**properties: Any) -> dict[str, Any]:
    return {"type": "object", "properties": properties, "additionalProperties": False}


def struct(**fields: pa.DataType) -> pa.DataType:
    return pa.struct([*fields.items()])


TYPES: list[tuple[Any, pa.DataType]] = [
    ({"type": "string", "pattern": "a", "description": "x"}, STRING),
    ({"type": "integer", "minimum": -5, "multipleOf": 5}, INT),
    ({"type": "integer", "maximum": 2**63 - 1}, INT),
    ({"type": "number", "exclusiveMinimum": 0}, FLOAT),
    ({"type": "number", "maximum": 1e300}, FLOAT),
    ({"type": ["integer", "number"]}, FLOAT),
    ({"type": "boolean"}, BOOL),
    ({"type": ["string", "null"]}, STRING),
    ({"enum": ["a", "b"]}, STRING),
    ({"enum": ["a", None], "type": ["string", "null"]}, STRING),
    ({"enum": [1, 2]}, INT),
    ({"enum": [1, 2.5]}, FLOAT),
    ({"const": True}, BOOL),
    ({"const": "x"}, STRING),
    ({"type": "array", "items": {"type": "integer"}, "maxItems": 3}, pa.list_(INT)),
    (closed(a={"type": "string"}, b={"type": "number"}), struct(a=STRING, b=FLOAT)),
    ({"type": "object", "properties": {"a": {"type": "string"}}, "required": []}, struct(a=STRING)),
    (closed(a=closed(b={"type": "boolean"})), struct(a=struct(b=BOOL))),
    ({"anyOf": [{"type": "integer"}, {"type": "null"}]}, INT),
    ({"oneOf": [{"type": "null"}, closed(a={"type": "string"})]}, struct(a=STRING)),
    ({"anyOf": [{"const": "a"}, {"type": "string", "minLength": 3}]}, STRING),
    (
        {"$ref": "#/$defs/a~1b",
         "$defs": {"a/b": closed(x={"$ref": "#/$defs/n"}), "n": {"type": "integer"}}},
        struct(x=INT),
    ),
]  # fmt: skip


@pytest.mark.parametrize(("schema", "type"), TYPES, ids=str)
def test_types(schema: Any, type: pa.DataType) -> None:
    assert arrow_type(schema) == type


NODE = {"type": "object", "properties": {"next": {"$ref": "#"}, "v": {"type": "integer"}}}
WIDE: dict[str, Any] = {"$ref": "#/$defs/d0", "$defs": {"d20": {"type": "string"}}}
for level in range(20):
    inner = {"$ref": f"#/$defs/d{level + 1}"}
    WIDE["$defs"][f"d{level}"] = closed(a=inner, b=inner)
DEEP: Any = {"type": "string"}
for _ in range(200):
    DEEP = {"type": "array", "items": DEEP}
NO_TYPE: list[tuple[Any, str]] = [
    (True, "the schema may be of any type"),
    ({}, "the schema names no type"),
    ({"type": "null"}, "the schema names no type"),
    ({"type": ["string", "integer"]}, "the schema may be of several types"),
    ({"enum": ["a", 1]}, "the schema may be of several types"),
    ({"enum": [1, True]}, "the schema may be of several types"),
    ({"enum": [2**63]}, "the schema may be of several types"),
    ({"const": {"a": 1}}, "the schema may be of several types"),
    ({"type": "integer", "minimum": -(2**64)}, "may be an integer of more than 64 bits"),
    ({"type": "integer", "exclusiveMaximum": 1e30}, "may be an integer of more than 64 bits"),
    ({"type": "object"}, "the schema has no named properties"),
    (closed(**{"": {"type": "string"}}), "the schema has no named properties"),
    (NODE, "/properties/next/$ref is recursive"),
    (closed(a=closed(b={}) | {"additionalProperties": True}), "/properties/a may have additional"),
    (closed(a={"type": "string"}) | {"patternProperties": {}}, "has patternProperties"),
    ({"type": "array"}, "/items may be of any type"),
    ({"type": "array", "items": {"type": "string"}, "prefixItems": []}, "has prefixItems"),
    ({"anyOf": [{"type": "string"}, {"type": "integer"}]}, "/anyOf may be of several types"),
    ({"anyOf": [{"type": "null"}]}, "/anyOf may be of several types"),
    (
        {"type": "string", "anyOf": [{"type": "string"}]},
        "the schema has other keywords next to anyOf",
    ),
    ({"allOf": [{"type": "string"}], "type": "string"}, "the schema has allOf"),
    ({"$ref": "https://example.org/x"}, "/$ref refers to https://example.org/x"),
    ({"$ref": "#/$defs/none"}, "/$ref refers to #/$defs/none"),
    (WIDE, "it describes too many fields or levels"),
    (DEEP, "it describes too many fields or levels"),
    (closed(**{"a/b": {"type": "string", "contentEncoding": "x"}}), "/properties/a~1b has content"),
]


@pytest.mark.parametrize(("schema", "why"), NO_TYPE, ids=lambda value: str(value)[:40])
def test_schemas_without_a_type(schema: Any, why: str) -> None:
    with pytest.raises(Inexact) as raised:
        arrow_type(schema)
    assert why in str(raised.value)


def column(schema: Any, start_after: str = "") -> ParsedColumn:
    # Without `make`: what it refuses must not kill the column either.
    return ParsedColumn.build(Constraint("json_schema", json.dumps(schema)), start_after)


def output(text: str, satisfied: bool | None = True, **more: Any) -> RequestOutput:
    return RequestOutput("", [], [], text, "stop", constraint_satisfied=satisfied, **more)


def values(parsed: ParsedColumn, *texts: str) -> list[Any]:
    array = parsed.array([output(text) for text in texts])
    assert array.type == parsed.type
    found: list[Any] = array.to_pylist()
    return found


PERSON = closed(
    name={"type": "string"},
    age={"type": "integer"},
    tags={"type": "array", "items": {"type": ["number", "null"]}},
    ok={"type": "boolean"},
)


def test_typed_values() -> None:
    text = '{"name":"é\\u00e9","age":-3,"tags":[1,2.5,null],"ok":false}'
    whole = {"name": "éé", "age": -3, "tags": [1.0, 2.5, None], "ok": False}
    part = {"name": None, "age": 2**63 - 1, "tags": None, "ok": None}
    assert values(column(PERSON), text, '{"age":9223372036854775807}') == [whole, part]


@pytest.mark.parametrize(
    "text",
    [
        "",
        '{"name":"a"',
        "NaN",
        "[1]",
        "null and more",
        '{"age":9223372036854775808}',
        '{"age":-9223372036854775809}',
        '{"age":1.5}',
        '{"age":true}',
        '{"age":"1"}',
        '{"ok":1}',
        '{"name":7}',
        '{"name":"\\ud800"}',
        '{"tags":[1e999]}',
        '{"tags":[-1e999]}',
        '{"tags":[' + "9" * 400 + "]}",
        '{"age":' + "9" * 5000 + "}",
        '{"tags":{}}',
        '{"tags":[true]}',
        '{"other":1}',
        "[" * 100_000,
    ],
    ids=lambda text: text[:30],
)
def test_odd_values_are_null_and_leave_the_others_alone(text: str) -> None:
    found = values(column(PERSON), '{"age":1}', text, '{"age":2.0}')
    assert found[1] is None
    assert [row["age"] for row in (found[0], found[2])] == [1, 2]


def test_rows_without_complete_json_are_null() -> None:
    rows = [
        None,
        output('{"age":1}', satisfied=None),
        output('{"age":1}', satisfied=False),
        output('{"age":1}', error=RequestError("failed", "it failed")),
        output('{"age":1}'),
    ]
    found = column(PERSON).array(rows).to_pylist()
    assert found[:4] == [None] * 4 and found[4]["age"] == 1


def test_json_text_where_there_is_no_type() -> None:
    for parsed, why in (
        (column({"type": "object"}), "because the schema has no named properties;"),
        (ParsedColumn.build(Constraint("json"), ""), "because there is no schema;"),
        (ParsedColumn.build(None, ""), "because each row has a schema of its own;"),
    ):
        assert parsed.type == STRING and not parsed.typed
        assert why in parsed.meaning and "null unless constraint_satisfied" in parsed.meaning
        assert values(parsed, ' {"a": [1]}\n', '{"a"', "Infinity", '"\\ud800"') == [
            '{"a": [1]}', None, None, '"\\ud800"'
        ]  # fmt: skip


def test_behind_the_marker() -> None:
    parsed = column({"type": "integer"}, start_after="</think>")
    assert values(parsed, "1 2</think>\n\n3", "4", "</think>5</think>") == [3, None, None]


SCALARS = st.sampled_from(
    [{"type": "string"}, {"type": "integer"}, {"type": "number"}, {"type": "boolean"}]
)
SCHEMAS = st.recursive(
    SCALARS,
    lambda inner: (
        inner.map(lambda s: {"type": "array", "items": s})
        | inner.map(lambda s: {"anyOf": [s, {"type": "null"}]})
        | st.dictionaries(st.sampled_from("abc"), inner, min_size=1).map(lambda p: closed(**p))
    ),
    max_leaves=6,
)
FLOATS = st.floats(allow_nan=False, allow_infinity=False)
ANYTHING = st.recursive(
    st.none() | st.booleans() | st.integers() | FLOATS | st.text(st.characters()),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.sampled_from("abcd"), inner),
    max_leaves=6,
)


def fitting(schema: Any) -> st.SearchStrategy[Any]:
    """Values of a schema, all properties there."""
    if "anyOf" in schema:
        return st.none() | fitting(schema["anyOf"][0])
    match schema["type"]:
        case "array":
            return st.lists(fitting(schema["items"]), max_size=3)
        case "object":
            return st.fixed_dictionaries({k: fitting(s) for k, s in schema["properties"].items()})
        case "integer":
            return st.integers(-(2**63), 2**63 - 1)
        case "number":
            return FLOATS
        case "boolean":
            return st.booleans()
    return st.text(st.characters(exclude_categories=["Cs"]))


@settings(max_examples=settings().max_examples * 2, deadline=None)
@given(st.data())
def test_what_goes_in_comes_out(data: st.DataObject) -> None:
    schema = data.draw(SCHEMAS)
    rows = data.draw(st.lists(fitting(schema), min_size=1, max_size=3))
    assert values(column(schema), *map(json.dumps, rows)) == rows


@settings(max_examples=settings().max_examples * 2, deadline=None)
@given(SCHEMAS, st.lists(ANYTHING, max_size=4))
def test_nothing_that_goes_in_is_changed_or_raises(schema: Any, rows: list[Any]) -> None:
    for row, found in zip(rows, values(column(schema), *map(json.dumps, rows)), strict=True):
        assert found is None or _equal(row, found)


def _equal(given: Any, found: Any) -> bool:
    if isinstance(found, dict):
        return given.keys() <= found.keys() and all(
            _equal(given.get(k), v) for k, v in found.items()
        )
    if isinstance(found, list):
        return len(given) == len(found) and all(map(_equal, given, found))
    return bool(given == found) or (isinstance(given, int) and float(given) == found)


ANSWERS = (
    ('{"name":"a","age":1}', "stop", True),
    ('{"name":"b","age":99999999999999999999}', "stop", True),
    ('{"name":"c', "length", False),
)


def test_a_job_writes_structs(tmp_path: Path) -> None:
    constraint = {"kind": "json_schema", "schema": PERSON}
    job = FakeJob(
        str(tmp_path / "out"), rows=6, bad=False, parsed=True, constraint=constraint,
        answers=ANSWERS, rows_per_shard=4,
    )  # fmt: skip
    assert job.run().exit_code == 0
    table = pq.read_table(tmp_path / "out/data")
    assert table.schema.field("parsed").type == arrow_type(PERSON)
    first = {"name": "a", "age": 1, "tags": None, "ok": None}
    assert table["parsed"].to_pylist() == [first, first, None, None, None, None] * 2
    loaded = datasets.load_dataset(str(tmp_path / "out"), cache_dir=str(tmp_path / "cache"))
    assert loaded["train"][0]["parsed"] == first
    card = (tmp_path / "out/README.md").read_text()
    assert "the JSON of text, typed by the schema" in card


def test_a_job_without_a_schema_writes_json_text(tmp_path: Path) -> None:
    job = FakeJob(
        str(tmp_path / "out"), rows=3, bad=False, parsed=True, constraint={"kind": "json"},
        answers=ANSWERS,
    )  # fmt: skip
    job.run()
    found = pq.read_table(tmp_path / "out/data")["parsed"].to_pylist()
    assert found == [ANSWERS[0][0]] * 2 + [ANSWERS[1][0]] * 2 + [None] * 2
