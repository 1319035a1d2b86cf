"""A field that an object of a row lacks acts as null; what is no data is never printed."""

import pytest

from batchgen.engine.interface.outputs import RequestError
from batchgen.util.templates.row_templates import RowTemplate

NULL, ABSENT = {"m": {"a": 1, "b": None}}, {"m": {"a": 1}}


@pytest.mark.parametrize(
    ("source", "text"),
    [
        ("{{ m.b or '-' }}", "-"),
        ("{{ m['b'] or '-' }}", "-"),
        ("{% if m.b is none %}none{% else %}some{% endif %}", "none"),
        ("{% if m.b is not none %}some{% else %}none{% endif %}", "none"),
        ("{% if m.b == none %}none{% endif %}", "none"),
        ("{% if m.b != 'x' %}other{% endif %}", "other"),
        ("{% if m.b in ['x', none] %}in{% endif %}", "in"),
        ("{{ 'y' if m.b else 'n' }}", "n"),
        ("{{ [m.b]|tojson }}", "[null]"),
    ],
)
def test_absent_and_null_are_the_same(source: str, text: str) -> None:
    template = RowTemplate("prompt.user", source, ["m"])
    assert template.render(NULL) == template.render(ABSENT) == text


@pytest.mark.parametrize("fields", [NULL, ABSENT])
@pytest.mark.parametrize("source", ["{{ m.b }}", "{{ m.b.c }}", "{{ m['b'] }}!"])
def test_neither_is_printed(source: str, fields: dict[str, object]) -> None:
    with pytest.raises(RequestError) as caught:
        RowTemplate("prompt.user", source, ["m"]).render(fields)
    assert caught.value.type == "missing_field"


@pytest.mark.parametrize(
    "source", ["{{ row.other or '-' }}", "{% if row.other is none %}x{% endif %}!"]
)
def test_a_column_that_is_not_there_is_no_null(source: str) -> None:
    template = RowTemplate("prompt.user", source, ["m"])
    if "or" in source:
        with pytest.raises(RequestError):
            template.render(ABSENT)
    else:
        assert template.render(ABSENT) == "!"


def test_a_key_goes_before_a_method() -> None:
    fields = {"doc": {"items": "x", "get": 2, "copy": [1]}}
    template = RowTemplate("prompt.user", "{{ doc.items }}{{ doc.get }}{{ doc.copy[0] }}", ["doc"])
    assert template.render(fields) == "x21"
    pairs = RowTemplate("p", "{% for k, v in doc.items() %}{{ k }}{% endfor %}", ["doc"])
    assert pairs.render(fields) == "itemsgetcopy"


@pytest.mark.parametrize(
    ("source", "name"),
    [
        ("{{ doc.items }}", "items"),
        ("{{ doc.a.upper }}", "upper"),
        ("{{ self }}", "TemplateReference"),
    ],
)
def test_what_is_no_data_is_an_error_row(source: str, name: str) -> None:
    with pytest.raises(RequestError, match=name) as caught:
        RowTemplate("prompt.user", source, ["doc"]).render({"doc": {"a": "x"}})
    assert caught.value.type == "template_error"
    assert "0x" not in str(caught.value)
