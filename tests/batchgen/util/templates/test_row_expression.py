"""Expressions over the columns of a row: what they see, what they are, and what they refuse."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from batchgen.util.errors import ConfigError
from batchgen.util.templates.row_expression import ExpressionFailed, RowExpression

COLUMNS = ("mark", "text", "meta", "result", "range")
FIELDS = {
    "mark": 1,
    "text": "a stone",
    "meta": {"lang": "en", "size": None},
    "result": [3, 4],
    "range": "near",
}


@pytest.mark.parametrize(
    ("source", "value"),
    [
        ("mark == 1 and text|length > 3", True),
        ("mark == 1 and not text", False),
        ("meta.lang", "en"),
        ("meta['lang'] ~ '-' ~ mark", "en-1"),
        ("meta.size is none", True),
        ("meta.colour is none", True),
        ("meta['colour'] == none and meta.colour != 'red' and not meta.colour", True),
        ("meta.colour", None),
        ("meta.colour or 'none'", "none"),
        ("[meta]|map(attribute='colour')", [None]),
        ("result|map('string')", ["3", "4"]),
        ("result|sum + mark", 8),
        ("range", "near"),
        ("row.text.startswith('a')", True),
        ("row['mark'] + row_index", 8),
        ("row_id", "q7"),
        ("text if mark else none", "a stone"),
    ],
)
def test_an_expression_has_a_value(source: str, value: Any) -> None:
    expression = RowExpression("dataset.where", source, COLUMNS)
    assert expression.value(FIELDS, row_id="q7", row_index=7) == value
    assert expression.is_true(FIELDS, row_id="q7", row_index=7) is bool(value)


def test_it_tells_which_columns_and_fields_it_reads() -> None:
    expression = RowExpression("w", "meta.lang == 'en' and row.mark > 0 and meta['size']", COLUMNS)
    assert expression.names == ("mark", "meta")
    assert expression.attributes("meta") == frozenset(("lang", "size"))
    assert RowExpression("w", "meta and meta.lang", COLUMNS).attributes("meta") is None
    assert RowExpression("w", "row|length", COLUMNS).names == COLUMNS
    assert RowExpression("w", "row_id ~ row_index", COLUMNS).names == ()


def test_a_column_goes_before_what_it_hides() -> None:
    expression = RowExpression("w", "row_id ~ row", ("row_id", "row"))
    assert expression.value({"row_id": "own", "row": 5}, row_id="q1") == "own5"
    assert expression.names == ("row_id", "row")


@pytest.mark.parametrize(
    ("source", "said"),
    [
        ("marks == 1", "there is no column 'marks': choose among mark, text"),
        ("row.marks", "there is no column 'marks'"),
        ("mark ==", "unexpected"),
        ("mark 1", "is not allowed there"),
        ("", "unexpected"),
        ("mark }} {{ mark", "is not allowed there"),
        ("text|random", "random"),
        ("text|uper", "uper"),
        ("(" * 5000 + "1" + ")" * 5000, "nested too deeply"),
        ("1" * 2**21, "characters"),
    ],
)
def test_what_does_not_compile_is_refused(source: str, said: str) -> None:
    with pytest.raises(ConfigError, match=r"^dataset\.where: ") as error:
        RowExpression("dataset.where", source, COLUMNS)
    assert said in str(error.value)
    assert len(str(error.value)) < 400


@pytest.mark.parametrize(
    ("source", "said"),
    [
        ("text > 3", "TypeError"),
        ("meta.size > 3", "TypeError"),
        ("meta.colour > 1", "colour"),
        ("meta.colour.shade", "colour"),
        ("row[text]", "the row has no column 'a stone'"),
        ("1 / (mark - 1)", "ZeroDivisionError"),
        ("'a' * 10**9", "produces more than"),
        ("text.__class__", "unsafe"),
        ("result.append(1)", "unsafe"),
        ("result[9]", "9"),
    ],
)
def test_a_row_without_a_value_says_why(source: str, said: str) -> None:
    expression = RowExpression("dataset.where", source, COLUMNS)
    with pytest.raises(ExpressionFailed, match=r"^dataset\.where: ") as error:
        expression.is_true(FIELDS)
    assert said in str(error.value)


def test_the_columns_that_are_null_are_named() -> None:
    expression = RowExpression("w", "mark > 1", COLUMNS)
    with pytest.raises(ExpressionFailed, match="null in this row: mark"):
        expression.value({**FIELDS, "mark": None})


@pytest.mark.thorough
@given(
    st.dictionaries(st.sampled_from(COLUMNS), st.none() | st.integers() | st.text()),
    st.sampled_from(["mark == 1", "text ~ mark", "result is none", "row|length", "mark < 3"]),
)
def test_a_value_depends_on_the_row_alone(fields: dict[str, Any], source: str) -> None:
    full = {name: fields.get(name) for name in COLUMNS}
    expression = RowExpression("w", source, COLUMNS)

    def value() -> Any:
        try:
            return expression.value(full)
        except ExpressionFailed as error:
            return str(error)

    first = value()
    RowExpression("w", "text", COLUMNS).value(full)
    assert value() == first
