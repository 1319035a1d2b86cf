"""Texts, rows and values as people and programs see them."""

from __future__ import annotations

import datetime
import json
import math
from decimal import Decimal
from typing import Any

import pyarrow as pa
import pytest
from datasets import Features, Value
from datasets.features import Json, List

from batchgen.inputs.dataset.stored_json import stored_field
from batchgen.pages.rows.printed_rows import RowText
from batchgen.util.shorten import beginning, end, wrapped
from batchgen.util.templates.used_columns import used_columns
from batchgen.util.text.row_json import json_readers, json_text, plain_text


def test_beginnings_and_ends_are_one_short_line() -> None:
    assert beginning("  a\n\n b\tc ", 5) == end("a\nb   c", 5) == "a b c"
    assert beginning("one two three", 8) == "one two…"
    assert beginning("one two three", 9) == "one two…"
    assert end("one two three", 8) == "…o three"
    assert end("one two three", 6) == "…three"
    assert beginning("a\x1b[2Jb", 12) == "a⟨U+001B⟩[2…"


@pytest.mark.parametrize(
    ("text", "width", "lines"),
    [
        ("", 10, [""]),
        ("one two three", 8, ["one two", "three"]),
        ("one two three", 7, ["one two", "three"]),
        ("abcdefghij k", 4, ["abcd", "efgh", "ij k"]),
        ("a\n\n  b", 10, ["a", "", "  b"]),
        ("日本語の文", 4, ["日本", "語の", "文"]),
        ("日本語", 5, ["日本", "語"]),
        ("e\u0301e\u0301 x", 3, ["e\u0301e\u0301", "x"]),
        ("a\tb\x07", 20, ["a   b⟨U+0007⟩"]),
    ],
)
def test_texts_are_wrapped_at_words(text: str, width: int, lines: list[str]) -> None:
    assert wrapped(text, width) == lines


def test_no_more_lines_than_wanted() -> None:
    assert wrapped("a\nb\nc", 9, 3) == ["a", "b", "c"]
    assert wrapped("a\nb\nc", 9, 2) == ["a", "b…"]
    assert wrapped("abcd efgh ijkl", 4, 2) == ["abcd", "efg…"]


ROW: dict[str, Any] = {
    "row_id": "r7",
    "sample_index": 1,
    "finish_reason": "stop",
    "num_generated_tokens": 1234,
    "q": "Why?",
    "text": "Because.\n" * 9,
    "error": None,
    "tags": [1, 2, 3, 4, 5, 6, 7, 8, 9],
}


def test_a_row_in_few_lines_and_whole() -> None:
    assert RowText(["q", "text", "error", "tags"], 40).lines(ROW) == [
        "row r7, sample 1, stop, 1,234 tokens",
        "  q     Why?",
        "  text  Because.",
        "        Because.",
        "        Because.",
        "        Because.…",
        "  tags  [1, 2, 3, 4, 5, 6, 7, 8, … 9 in",
        "        all]",
    ]
    whole = RowText(["text", "tags"], 60, whole_texts=True, whole_lists=True).lines(ROW)
    assert len(whole) == 11 and whole[-1] == "  tags  [1, 2, 3, 4, 5, 6, 7, 8, 9]"


def test_an_error_row() -> None:
    row = ROW | {
        "sample_index": 0,
        "finish_reason": "error",
        "num_generated_tokens": 0,
        "text": None,
    }
    row |= {"error": {"type": "empty_prompt", "message": "it is empty"}, "num_forwards": None}
    assert RowText(["text", "error"], 80).lines(row) == [
        "row r7, error",
        "  error  empty_prompt: it is empty",
    ]
    assert RowText([], 80).lines(row | {"num_forwards": 5}) == ["row r7, error, 5 forwards"]


def test_values_that_json_does_not_have() -> None:
    values = {"a": [1.5, math.nan, {"b": -math.inf}], "c": b"\x00\xff", "d": Decimal("1.20")}
    values |= {"e": datetime.date(2024, 1, 2), "f": datetime.timedelta(seconds=61), "g": "ä\n"}
    text = json_text(values)
    assert "\n" not in text and "ä" in text
    assert json.loads(text) == {
        "a": [1.5, None, {"b": None}],
        "c": "AP8=",
        "d": "1.20",
        "e": "2024-01-02",
        "f": "0:01:01",
        "g": "ä\n",
    }


def test_json_that_was_stored_as_text_is_read_back() -> None:
    kind = List({"role": Value("string"), "content": Json()})
    storage = pa.list_(pa.struct([("role", pa.string()), ("content", pa.string())]))
    schema = pa.schema([
        stored_field("messages", kind, storage),
        stored_field("any", Features({"any": Json()})["any"], pa.string()),
        pa.field("text", pa.string()),
    ])  # fmt: skip
    readers = json_readers(schema)
    assert [*readers] == ["messages", "any"]
    assert readers["messages"]([{"role": "user", "content": '["hi", 1]'}]) == [
        {"role": "user", "content": ["hi", 1]}
    ]
    assert readers["any"]('{"a": null}') == {"a": None} and readers["any"](None) is None


@pytest.mark.parametrize(
    ("prompt", "columns"),
    [
        ({"user": "{{ b }} {{ a }} {{ b }}", "system": None}, ["b", "a"]),
        ({"user": "{{ q }}", "system": "Be {{ mood | default('kind') }}."}, ["mood", "q"]),
        ({"text": "{% for x in items %}{{ x }}{% endfor %}{{ row.a }}{{ row['b c'] }}"},
         ["items", "a", "b c"]),
        ({"messages_column": "body.messages"}, ["body"]),
        ({"token_ids_column": "ids"}, ["ids"]),
        ({"user": "{{ broken"}, []),
        ({"user": "no column"}, []),
    ],
)  # fmt: skip
def test_columns_that_a_prompt_uses(prompt: dict[str, Any], columns: list[str]) -> None:
    assert used_columns(prompt) == columns


@pytest.mark.parametrize(
    ("value", "text"),
    [
        ('a "b"\n', 'a "b"\n'),
        (datetime.date(2024, 1, 2), "2024-01-02"),
        (datetime.datetime(2024, 1, 2, 3), "2024-01-02T03:00:00"),
        (Decimal("1.10"), "1.10"),
        (b"\x00\xff", "AP8="),
        (True, "true"),
        (["a"], '["a"]'),
    ],
)
def test_text_of_a_value_has_no_quotes(value: Any, text: str) -> None:
    assert plain_text(value) == text
