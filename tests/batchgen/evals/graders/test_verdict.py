"""`Verdict` reads what a judge has decided, and `Majority` counts the marks of several."""

from typing import Any

import pytest

from batchgen.evals.graders.step import AnswerRow
from batchgen.evals.graders.verdict import Majority, Verdict
from batchgen.util.errors import ConfigError

LETTERS: dict[str, float] = {"A": 1, "B": 0, "C": 0.5}
HLE = r"(?i)\bcorrect\b[\s*:\"'\]]{1,9}(yes|no)\b"


@pytest.mark.parametrize(
    ("options", "text", "verdict", "mark"),
    [
        ({"marks": LETTERS}, "A", "A", 1),
        ({"marks": LETTERS}, " B.\n", "B", 0),
        ({"marks": LETTERS}, "Not A. It is (C).", "C", 0.5),
        ({"marks": LETTERS}, "Both", None, None),
        ({"marks": LETTERS}, "", None, None),
        ({"marks": LETTERS}, "<think>A or B?</think>A", "A", 1),
        ({"marks": LETTERS}, "<think>A</think>none", None, None),
        ({"marks": {"yes": 1, "no": 0}, "pattern": HLE}, "correct: yes\nconfidence: 90", "yes", 1),
        ({"marks": {"yes": 1, "no": 0}, "pattern": HLE}, "**correct:** No", "no", 0),
        ({"marks": {"yes": 1, "no": 0}, "pattern": HLE}, "[correct_answer]: yes", None, None),
        ({"marks": {"yes": 1, "no": 0}, "pattern": HLE}, "correct: perhaps", None, None),
        ({"marks": {"yes": 1}, "pattern": "(maybe)"}, "maybe", None, None),
        ({"marks": LETTERS, "flip": {"order": "ba"}}, "A", "A", 0),
        ({"marks": LETTERS, "flip": {"order": "ab"}}, "A", "A", 1),
        ({"marks": LETTERS, "flip": {"order": "ba"}}, "C", "C", 0.5),
    ],
)
def test_verdicts(options: dict[str, Any], text: str, verdict: str | None, mark: Any) -> None:
    found = Verdict(**options).apply(AnswerRow(text, {"order": "ba"}, {}))
    assert found == {"verdict": verdict, "mark": mark}


@pytest.mark.parametrize(
    ("options", "says"),
    [
        ({}, "marks is empty"),
        ({"marks": {"A": 2}}, "from 0 to 1"),
        ({"marks": {"A": True}}, "from 0 to 1"),
        ({"marks": {"A": 1}, "pattern": "("}, "not a regular expression"),
        ({"marks": {"A": 1}, "pattern": "A"}, "must have a group"),
        ({"marks": {"A": 1}, "flip": {}}, "one column"),
    ],
)
def test_mistakes_in_options(options: dict[str, Any], says: str) -> None:
    with pytest.raises(ConfigError, match=says):
        Verdict(**options)


@pytest.mark.parametrize(
    ("by", "marks", "own", "mark", "share"),
    [
        ("votes", [1, 0], 1.0, 1, 2 / 3),
        ("votes", [0, 0], 1.0, 0, 2 / 3),
        ("votes", [0, 1], None, 0, 0.5),  # of equal votes, the first judge's
        ("votes", [1, 0], None, 1, 0.5),
        ("votes", [None, 1], 0.0, 1, 0.5),
        ("votes", [0, 1], 0.5, 0, 1 / 3),
        ("votes", [None, None], 1.0, 1, 1),
        ("votes", [None, None], None, None, None),
        ("median", [0.25, 1], 0.5, 0.5, 1 / 3),
        ("median", [0.25, 1], None, 0.625, 0),
        ("median", [0.25, 0.25], 1.0, 0.25, 2 / 3),
        ("median", [None, None], None, None, None),
    ],
)
def test_majorities(by: Any, marks: list[Any], own: Any, mark: Any, share: Any) -> None:
    step = Majority(marks=("a_mark", "b_mark"), own="c_mark", by=by)
    row = AnswerRow("", dict(zip(step.field_names, marks, strict=True)), {"c_mark": own})
    assert step.apply(row) == {"mark": mark, "majority": share}


@pytest.mark.parametrize(
    ("options", "says"),
    [
        ({"marks": ()}, "two judges or more"),
        ({"marks": ("a", "a")}, "two judges or more"),
        ({"marks": ("c",)}, "two judges or more"),
        ({"marks": ("a",), "by": "mean"}, "votes or median"),
    ],
)
def test_mistakes_in_majorities(options: dict[str, Any], says: str) -> None:
    with pytest.raises(ConfigError, match=says):
        Majority(**{"own": "c", **options})
