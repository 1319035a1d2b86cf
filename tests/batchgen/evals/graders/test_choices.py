"""The order of choices depends on the row and on nothing else."""

import hashlib
from collections import Counter
from itertools import permutations
from typing import Any

import pytest

from batchgen.evals.graders.choices import (
    LETTERS,
    BadChoices,
    OrderChoices,
    letter_of,
    rotate_choices,
    shuffle_choices,
)
from batchgen.util.errors import ConfigError

FOUR = ("right", "wrong 1", "wrong 2", "wrong 3")
ROW = {name: f" {name}\n" for name in FOUR} | {"id": "x"}


def test_a_circle_begins_where_it_is_told() -> None:
    assert [rotate_choices("ABCD", by) for by in (0, 1, 5, -1)] == [
        list("ABCD"),
        list("BCDA"),
        list("BCDA"),
        list("DABC"),
    ]


def test_rotation_is_that_of_opencompass() -> None:
    """Row by row against its list of patterns, which it indexes with a counter that starts at 1."""
    patterns = ["ABCD", "BCDA", "CDAB", "DABC"]
    step = OrderChoices(columns=FOUR, order="rotated")
    for index in range(8):
        texts = dict(zip("ABCD", (ROW[name] for name in FOUR), strict=True))
        wanted = [texts[letter] for letter in patterns[(index + 1) % 4]]
        values = step.apply(index, ROW)
        assert values["choices"] == wanted
        assert values["target"] == "ABCD"[wanted.index(texts["A"])]


def test_shuffled_order_is_as_documented_and_needs_the_key_alone() -> None:
    orders = list(permutations("ABCD"))
    for key in ("", "x", "ß"):
        number = int.from_bytes(hashlib.sha256(key.encode()).digest(), "big") % 24
        assert shuffle_choices("ABCD", key) == list(orders[number])
    step = OrderChoices(columns=FOUR, order="shuffled", key_column="id")
    assert step.apply(0, ROW) == step.apply(77, ROW)


def test_more_than_nine_choices_are_shuffled() -> None:
    step = OrderChoices(choices_column="c", target_column="a", order="shuffled", key_column="id")
    orders = set()
    for key in range(200):
        values = step.apply(0, {"c": list("abcdefghijklmnopqrstuvwxyz"), "a": "J", "id": key})
        assert sorted(values["choices"]) == list("abcdefghijklmnopqrstuvwxyz")
        assert values["choices"][LETTERS.index(values["target"])] == "j"
        orders.add("".join(values["choices"]))
    assert len(orders) == 200


def test_shuffled_orders_are_equally_likely() -> None:
    counts = Counter("".join(shuffle_choices("ABCD", str(i))) for i in range(4800))
    assert len(counts) == 24 and 140 < min(counts.values()) <= max(counts.values()) < 265


def test_the_letter_of_equal_choices_is_the_first() -> None:
    assert letter_of(["x", "y", "y"], "y") == "B"


def test_a_column_behind_the_first_may_hold_several_choices() -> None:
    step = OrderChoices(columns=("right", "wrong"))
    made = step.apply(0, {"right": "Paris", "wrong": ["Rome", "Oslo", 3]})
    assert made == {"choices": ["Paris", "Rome", "Oslo", "3"], "target": "A"}


@pytest.mark.parametrize("target", ["C", "c", 2])
def test_choices_in_one_column(target: Any) -> None:
    step = OrderChoices(choices_column="options", target_column="answer", order="rotated")
    row = {"options": ["a", "b", "c"], "answer": target}
    assert step.apply(0, row) == {"choices": ["b", "c", "a"], "target": "B"}


@pytest.mark.parametrize(
    ("row", "says"),
    [
        ({**ROW, "wrong 2": None}, "'wrong 2'"),
        ({}, "'right'"),
    ],
)
def test_rows_without_a_choice(row: dict[str, Any], says: str) -> None:
    with pytest.raises(BadChoices, match=says):
        OrderChoices(columns=FOUR).apply(0, row)


@pytest.mark.parametrize("target", ["D", "", "AB", 3, -1, None, 1.0, True])
def test_targets_that_are_no_choice(target: Any) -> None:
    step = OrderChoices(choices_column="options", target_column="answer")
    with pytest.raises(BadChoices, match="answer"):
        step.apply(0, {"options": ["a", "b", "c"], "answer": target})


@pytest.mark.parametrize(
    ("options", "says"),
    [
        (["a", None], "'options' must hold a text or a number for each choice"),
        ([["a"], "b"], "'options' must hold a text or a number for each choice"),
        ("abc", "'options' must hold a list of choices, got str"),
        ({"text": ["a", "b"]}, "'options' must hold a list of choices, got dict"),
        ([str(i) for i in range(27)], "27 choices, and only 26 letters"),
        ([], "one of 0 choices"),
    ],
)
def test_lists_that_are_no_choices(options: Any, says: str) -> None:
    step = OrderChoices(choices_column="options", target_column="answer")
    with pytest.raises(BadChoices, match=says):
        step.apply(0, {"options": options, "answer": 0})
    with pytest.raises(BadChoices, match="'right' must hold a text or a number"):
        OrderChoices(columns=FOUR).apply(0, {**ROW, "right": ["right", "left"]})


@pytest.mark.parametrize(
    ("options", "says"),
    [
        ({}, "either columns"),
        ({"columns": ["a"], "choices_column": "b", "target_column": "c"}, "either columns"),
        ({"choices_column": "b"}, "target_column belongs"),
        ({"columns": ["a"], "order": "shuffled"}, "key_column belongs"),
        ({"columns": ["a"], "key_column": "k"}, "key_column belongs"),
        ({"columns": ["a"], "order": "random"}, "given, rotated or shuffled"),
    ],
)
def test_mistakes_in_options_are_refused(options: dict[str, Any], says: str) -> None:
    with pytest.raises(ConfigError, match=says):
        OrderChoices(**options)
