"""Texts of the command line: they mean what was typed, and what is not clear is refused."""

import json
from collections.abc import Mapping
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from batchgen.config.groups.read_value import UnclearEscape, Unreadable, decode_escapes, read_value

Texts = tuple[str, ...]
Options = Mapping[str, Any] | None


@pytest.mark.parametrize(
    ("text", "hint", "escapes", "value"),
    [
        ("{{ q }} (a, b=c)? [d] {e}", str, True, "{{ q }} (a, b=c)? [d] {e}"),
        (" two  spaces ", str | None, True, " two  spaces "),
        ('"{{ q }}"', str, True, "{{ q }}"),
        ("'{{ q }}'", str, True, "{{ q }}"),
        (r"'it\'s \d'", str, True, r"it's \d"),
        ('Say "hi"', str, True, 'Say "hi"'),
        ('"a" or "b"', str, True, '"a" or "b"'),
        (r"A\nB", str, True, "A\nB"),
        (r"A\\nB", str, True, r"A\nB"),
        (r'"A\nb\t\"\\\u00e9\x41\ud83d\ude00"', str, False, 'A\nb\t"\\éA😀'),
        (r"\boxed{\frac{1}{2}}", str, True, r"\boxed{\frac{1}{2}}"),
        (r"C:\new\table", str, False, r"C:\new\table"),
        (r"\d{4}-\d{2}", str | None, False, r"\d{4}-\d{2}"),
        (r'"\d{4}"', str | None, False, r"\d{4}"),
        ("12", str, False, "12"),
        ("true", str, False, "true"),
        ("null", str | None, False, None),
        ('"null"', str | None, False, "null"),
        ("", str, False, ""),
        ("${sampling.seed}", int, False, "${sampling.seed}"),
        ("12", int | None, False, 12),
        ("-3", int, False, -3),
        ("1_000", int, False, 1000),
        ("1e-3", float, False, 1e-3),
        (".5", float, False, 0.5),
        ("False", bool, False, False),
        ("hot", float, False, "hot"),
        ('"1"', int, False, "1"),
        ("END", Texts, True, ["END"]),
        (" END", Texts, True, [" END"]),
        ("", Texts, True, []),
        ("a, b", Texts, True, ["a", "b"]),
        ('"a, b"', Texts, True, ["a, b"]),
        (r""" "a\n,", 'b', c d""", Texts, True, ["a\n,", "b", "c d"]),
        (r"\n\n", Texts, True, ["\n\n"]),
        (r"[\n]", Texts, True, ["\n"]),
        (r"""["\n\n", a b, "x,]", 1, ']']""", Texts, True, ["\n\n", "a b", "x,]", "1", "]"]),
        ("[yes,no]", Texts, True, ["yes", "no"]),
        ("[]", Texts, True, []),
        ("5", tuple[int, ...], False, [5]),
        ("[1, 2]", tuple[int, ...], False, [1, 2]),
        ("[${a}, ${b,c}]", Texts, False, ["${a}", "${b,c}"]),
        ("person.json", Options, False, "person.json"),
        ("{}", Options, False, {}),
        ("{a: {b: [1, x, null]}, 'c,d': 2.5}", Options, False,
         {"a": {"b": [1, "x", None]}, "c,d": 2.5}),
        ("{url: http://x}", Options, False, {"url": "http://x"}),
        ("[1,{a: true}]", Any, False, [1, {"a": True}]),
        ("some text", Any, False, "some text"),
        ("7", Any, False, 7),
    ],
)  # fmt: skip
def test_values(text: str, hint: Any, escapes: bool, value: object) -> None:
    found = read_value(text, hint, escapes=escapes)
    assert found == value and type(found) is type(value)


@pytest.mark.parametrize(
    ("text", "hint", "why"),
    [
        ("[a", Texts, "the closing ] is missing"),
        ("[a]b", Texts, "b follows the closing bracket"),
        ("a,", Texts, "there is nothing on one side of a comma"),
        ("[a,,b]", Texts, "a value is missing before ,"),
        ('["a" b]', Texts, "b] is where , or ] should be"),
        ("['a]", Texts, "the quote in 'a is not closed"),
        ("{a}", Options, "the key a has no value"),
        ("{{ a }}", Options, "a key is missing before {"),
        ("{a: 1, a: 2}", Options, "the key a appears twice"),
        ("{a: 1", Any, "the closing } is missing"),
        (r'"\ud83d"', str, "half of a pair"),
    ],
)
def test_what_cannot_be_read(text: str, hint: Any, why: str) -> None:
    with pytest.raises(Unreadable) as raised:
        read_value(text, hint, escapes=True)
    assert why in str(raised.value)


@pytest.mark.parametrize("text", [r"$\theta$", r"a\nb", r"\right)"])
def test_an_escape_that_may_be_a_command_of_latex_is_not_guessed(text: str) -> None:
    with pytest.raises(UnclearEscape):
        read_value(text, str, escapes=True)
    assert read_value(text, str, escapes=False) == text
    doubled = text.replace("\\", "\\\\")
    assert read_value(doubled, str, escapes=True) == text
    assert read_value(f'"{text}"', str, escapes=True) == decode_escapes(text, quoted=True) != text


SINGLE = {
    r"\nclass": ("the end of a line", r"\\n", "\nclass"),
    r"\theta": ("a tab", r"\\t", "\theta"),
    r"a\\b": ("a backslash", r"\\\\", r"a\b"),
    r"\u00e9": ("the text é", r"\\u00e9", "é"),
    r"\"": ('the text "', r"\\\"", '"'),
}
"""What stands in single quotes → what it may be, how the letters are written in double quotes, and
what double quotes make of it."""


@pytest.mark.parametrize("escapes", [True, False])
@pytest.mark.parametrize(
    ("form", "hint"),
    [
        ("{}", str),
        ("{}", str | None),
        ("{}", Texts),
        ("[{}]", Texts),
        ("[a, {}]", Texts),
        ("a,{}", Texts),
        ("{{a: {}}}", Options),
        ("{{{}: 1}}", Options),
        ("[{{user: [{}]}}]", Any),
        ("{}", Any),
        ("{}", int),
    ],
)
@pytest.mark.parametrize("text", sorted(SINGLE))
def test_single_quotes_never_mean_another_text_than_double_quotes(
    text: str, form: str, hint: Any, escapes: bool
) -> None:
    meaning, letters, double = SINGLE[text]
    with pytest.raises(Unreadable) as raised:
        read_value(form.format(f"'{text}'"), hint, escapes=escapes)
    assert f"in single quotes may be {meaning} or" in str(raised.value)
    assert str(raised.value).endswith(f"and {letters} for the latter")
    found = read_value(form.format(f'"{text}"'), hint, escapes=escapes)
    assert json.dumps(double) in json.dumps(found)
    for same in (r"\d+", "a b", "{{ q }}", "it's"):
        quoted = same.replace("'", "\\'")
        one, other = form.format(f"'{quoted}'"), form.format(f'"{same}"')
        assert read_value(one, hint, escapes=escapes) == read_value(other, hint, escapes=escapes)


TEXTS = st.text(st.characters(exclude_categories=["Cs"], exclude_characters="\b\f"), max_size=20)
"""Texts without the two characters whose escapes of JSON are left as they are: \\boxed, \\frac."""
JSON = st.recursive(
    st.none()
    | st.booleans()
    | st.integers()
    | st.floats(allow_nan=False, allow_infinity=False)
    | TEXTS,
    lambda items: st.lists(items, max_size=3) | st.dictionaries(TEXTS, items, max_size=3),
    max_leaves=8,
)


@given(TEXTS)
def test_json_strings_mean_their_text(text: str) -> None:
    assert read_value(json.dumps(text), str, escapes=True) == text
    assert read_value(json.dumps([text, text]), Texts, escapes=True) == [text, text]


@given(st.dictionaries(TEXTS, JSON, max_size=4))
def test_json_objects_are_mappings(value: dict[str, Any]) -> None:
    assert read_value(json.dumps(value, ensure_ascii=False), Options) == value


@given(TEXTS)
def test_a_path_or_pattern_is_what_was_typed(text: str) -> None:
    kept = text.strip().lower() != "null" and not text.strip().startswith(('"', "'"))
    assert not kept or read_value(text, str | None) == text
