"""What a row is depends on that row alone, and not on what other rows or files hold."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest

from batchgen.engine.interface.outputs import RequestError
from batchgen.inputs.dataset.row_digest import rows_digest
from batchgen.inputs.tables import json_tables
from tests.support.jobs.row_files import BOTH, fields, jsonl, read_back, same, source

pytestmark = pytest.mark.usefixtures("in_folder")

LIKE_JSON = ["007", "null", "true", "1e5", "1.50", "-0", "NaN", " 12 ", "[1, 2]", '{"k": 1}', '"q"']
ODD: list[Any] = [
    *LIKE_JSON,
    "plain",
    "",
    7,
    -0.0,
    1.0,
    0.5,
    2**53 + 1,
    2**70,
    True,
    None,
    [],
    [1, "1", 1.5, None],
    {},
    {"a": "007", "b": None},
    {"b": 1, "a": {"c": ["null"]}},
]


def nulls_left_out(row: dict[str, Any], wrap: str) -> dict[str, Any]:
    if wrap == "in a struct" and row["v"]["m"]["x"] is None:
        return {"v": {"m": {}}}
    if wrap == "in messages" and row["v"][0]["content"] is None:
        return {"v": [{"role": "user"}]}
    return row


@pytest.mark.quick(2)
@BOTH
@pytest.mark.parametrize("wrap", ["alone", "in a list", "in a struct", "in messages"])
def test_a_value_stays_what_its_row_says(wrap: str, streaming: bool) -> None:
    wraps: dict[str, Any] = {
        "alone": lambda v: v,
        "in a list": lambda v: [v, "x"],
        "in a struct": lambda v: {"m": {"x": v}},
        "in messages": lambda v: [{"role": "user", "content": v}],
    }
    rows = [{"v": wraps[wrap](value)} for value in ODD]
    for some in (rows, rows[::-1]):
        data = source(jsonl("a.jsonl", some), streaming=streaming)
        assert same(fields(data), some)
        # A file of Arrow types cannot tell a null in a struct from a field that is not there.
        assert same(read_back(data), [nulls_left_out(row, wrap) for row in some])
    jsonl("d/1.jsonl", rows[:5])
    jsonl("d/2.jsonl", rows[5:])
    assert same(fields(source("d", streaming=streaming)), rows)


@BOTH
def test_text_that_is_json_is_an_id_of_its_own(streaming: bool) -> None:
    rows = [{"i": "01"}, {"i": "1"}, {"i": 1.5, "n": 1}, {"i": 2}]
    path = jsonl("a.jsonl", rows[:2] + rows[3:])
    data = source(path, id_column="i", streaming=streaming)
    assert [row.id for row in data.rows()] == ["01", "1", "2"]


@pytest.mark.parametrize(
    ("values", "kind"),
    [
        ([1, 2.5, -3], pa.float64()),  # whole numbers are integers
        ([1, 2.0], pa.string()),
        ([2**53 + 1, 0.5], pa.string()),
        ([1.0, 2.5], pa.float64()),
        ([1, 2], pa.int64()),
        ([2**63 - 1, -(2**63)], pa.int64()),
        ([2**63, 1], pa.string()),
        ([[1], [0.5, None]], pa.list_(pa.float64())),
    ],
)
def test_integers_beside_floats(values: list[Any], kind: pa.DataType) -> None:
    rows = [{"v": value} for value in values]
    data = source(jsonl("a.jsonl", rows))
    assert data.schema.field("v").type == kind
    assert same(fields(data), rows)
    assert same(read_back(data), rows)


@BOTH
def test_columns_that_are_null_empty_or_not_there_in_another_file(streaming: bool) -> None:
    first: dict[str, Any] = {"v": "1", "c": [], "d": None, "s": {"a": None}}
    second = {"v": "2", "c": ["z"], "d": "text", "s": {"a": {"b": 1}}, "more": 1}
    jsonl("d/a.jsonl", [first])
    jsonl("d/b.jsonl", [second])
    data = source("d", streaming=streaming)
    assert same(fields(data), [{**first, "more": None}, second])
    kinds = [
        pa.string(),
        pa.list_(pa.string()),
        pa.string(),
        pa.struct([("a", pa.struct([("b", pa.int64())]))]),
    ]
    assert data.schema.types == [*kinds, pa.int64()]


@BOTH
def test_an_empty_file_beside_others_changes_no_row(streaming: bool) -> None:
    rows = [{"v": 0}, {"v": 2**63}, {"v": "007"}]
    jsonl("d/a.jsonl", [])
    Path("d/b.jsonl").write_text("\n \n")
    jsonl("d/c.jsonl", rows)
    assert same(fields(source("d", streaming=streaming)), rows)


def test_the_digest_tells_what_the_text_tells() -> None:
    def digest(*rows: dict[str, Any]) -> Any:
        return rows_digest(source(jsonl("a.jsonl", list(rows))), len(rows))

    several = [digest({"v": v}, {"v": [1]}) for v in ("7", 7, 7.0, "null", [7], {"a": 1, "b": 2})]
    assert len({str(one) for one in several}) == len(several)
    mixed: list[dict[str, Any]] = [
        {"m": [{"content": "é/x"}], "k": {"a": 0.5, "c": [{"z": None, "y": "w"}]}},
        {"m": [{"content": [{"type": "text"}]}], "k": {"b": []}},
    ]
    plain: list[dict[str, Any]] = [
        {"v": "a/b", "n": [1, None], "m": {"x": 1.5}},
        {"v": None, "n": [], "m": {"x": 2.0}},
    ]
    # As an older version had them: its jobs go on.
    assert digest(*plain) == ["68dbd9c317b2fb378a003afe29e1990a"]
    assert digest(*mixed) == ["d44d8e98235c2e4674910f58e9da512a"]


@BOTH
def test_half_of_a_character_is_an_error_of_its_row(streaming: bool) -> None:
    lines = ['{"v": "ok", "w": 1}', r'{"v": "\ud83d", "w": 2}', r'{"v": "\ud83d\ude42", "w": 3}']
    Path("a.jsonl").write_text("\n".join(lines))
    Path("b.json").write_text(f"[{','.join(lines)}]")
    for name in ("a.jsonl", "b.json"):
        data = source(name, streaming=streaming)
        good, bad, pair = data.rows()
        assert data.passthrough(good) == {"v": "ok", "w": 1}
        assert data.passthrough(pair) == {"v": "🙂", "w": 3}
        with pytest.raises(RequestError, match="column 'v' has half of a UTF-16 pair") as raised:
            data.passthrough(bad)
        assert raised.value.type == "bad_row"
        others = source(name, columns=("w",), streaming=streaming)
        assert [others.passthrough(row) for row in others.rows()] == [{"w": i} for i in (1, 2, 3)]
        if not streaming:
            assert rows_digest(data, 3) != rows_digest(data, 2)


def test_what_columns_hold_is_found_once(monkeypatch: pytest.MonkeyPatch) -> None:
    path = jsonl("a.jsonl", [{"v": 1}, {"v": "x"}])
    first = source(path)
    monkeypatch.setattr(json_tables, "_seen_columns", None)
    assert source(path).schema.equals(first.schema, check_metadata=True)
    assert fields(source(path)) == fields(first)


def test_rows_lie_in_chunks_anywhere(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(json_tables, "_CHUNK", 10)
    rows = [{"v": value} for value in ODD]
    assert same(fields(source(jsonl("a.jsonl", rows))), rows)
