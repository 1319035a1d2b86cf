"""Made answers, 100 at least for each grader: their verdict follows from how they are made."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import product
from typing import Any

import pytest

from batchgen.evals.graders.extract import Extract
from batchgen.evals.graders.grade import Grade
from batchgen.evals.graders.grade_rows import run_post_steps
from batchgen.evals.graders.parse_score import ChoiceScore, ParseScore
from batchgen.evals.graders.step import AnswerRow, PostStep
from batchgen.evals.graders.verdict import Majority, Verdict

WORDS: tuple[str, ...] = (
    "iron",
    "copper",
    "a blue whale",
    "Zürich",
    "7 July 1921",
    "O(n log n)",
    "水",
    "x² + 1",
)
WORDS += ("no", "Ada Lovelace", "C++", "$4.50", "“yes”")
LETTERS = "ABCDE"
Made = tuple[str, dict[str, Any], float | None]
"""An answer, the fields of its row, and its mark."""


def exact() -> Iterator[Made]:
    for place, word in enumerate(WORDS):
        other = WORDS[place - 1]
        right = [word, f"  {word}\n", word.replace(" ", "   "), word.replace(" ", "\n")]
        wrong = [other, f"{word} {word}", f"{word}!", f"not {word}", word[:-1] + "§"]
        for text in right:
            yield text, {"target": word}, 1.0
        for text in wrong:
            yield text, {"target": word}, 0.0


def contains() -> Iterator[Made]:
    for place, word in enumerate(WORDS):
        first, second = WORDS[place - 1], WORDS[place - 2]
        for text, mark in (
            (f"They are {word}, {first} and {second}.", 1.0),
            (f"They are {word} and {first}.".upper().replace("SS", "ß"), 2 / 3),
            (f"{first}\n{second}", 2 / 3),
            (second, 1 / 3),
            ("none of §", 0.0),
        ):
            wanted = [word, first, second]
            held = sum(each.casefold() in text.casefold() for each in wanted) / 3
            if held == pytest.approx(mark):  # some words stand in others
                yield text, {"target": wanted}, mark
        yield f"It is {word}.", {"target": word}, 1.0
        yield "It is §.", {"target": word}, 0.0
        yield f"{word} {word}", {"target": word}, 1.0
        yield word[:-1] + "§", {"target": word}, 0.0


def regex() -> Iterator[Made]:
    for number, unit in product(range(13), ("cm", "kg")):
        target = rf"{number}\s?{unit}"
        yield f"{number} {unit}", {"target": target}, 1.0
        yield f"{number}{unit}", {"target": target}, 1.0
        yield f"about {number} {unit}", {"target": target}, 0.0
        yield f"{number + 1} {unit}", {"target": target}, 0.0


def json_schema() -> Iterator[Made]:
    kinds = {"integer": "7", "string": '"7"', "boolean": "true", "array": "[7]", "null": "null"}
    for (wanted, _), (kind, value) in product(kinds.items(), kinds.items()):
        schema = '{"type": "object", "required": ["a"], "properties": {"a": {"type": "%s"}}}'
        fields = {"target": schema % wanted}
        yield f'{{"a": {value}}}', fields, float(kind == wanted)
        yield f' {{"b": 1, "a": {value}}}\n', fields, float(kind == wanted)
        yield f'{{"b": {value}}}', fields, 0.0
        yield f'{{"a": {value}', fields, 0.0


def choice() -> Iterator[Made]:
    words = WORDS[:5]
    for letter, other in product(LETTERS, LETTERS):
        fields = {"target": letter, "choices": list(words)}
        mark = float(letter == other)
        for text in (other, other.lower(), f"({other})", f"{other}.", words[LETTERS.index(other)]):
            yield text, fields, mark


def integer() -> Iterator[Made]:
    for number in range(-12, 13):
        target = {"target": str(number)}
        yield f"{number}", target, 1.0
        yield f"{number}.0", target, 1.0
        yield f"{number + 1}", target, 0.0
        yield f"{number}.5", target, 0.0


GRADES = {f.__name__: f for f in (exact, contains, regex, json_schema, choice, integer)}


@pytest.mark.parametrize("method", GRADES)
def test_grades(method: Any) -> None:
    made = list(GRADES[method]())
    steps: list[PostStep] = [Extract(methods=("whole",)), Grade(method=method)]
    found = [run_post_steps(steps, AnswerRow(text, fields, {})) for text, fields, _ in made]
    wrong = [
        (text, fields, values)
        for (text, fields, mark), values in zip(made, found, strict=True)
        if values.get("mark") != pytest.approx(mark) or values.get("grade_error")
    ]
    assert len(made) >= 100 and wrong == []


VERDICTS: tuple[str, ...] = (
    "{}",
    "{}.",
    "({})",
    "**{}**",
    "The verdict is {}.",
    "<think>{other}</think>{}",
)
VERDICTS += ("Not {other}. {}", "{other}? No: {}", " \n{}\n", "[[{}]]", "It is {}: it is right.")


def test_verdicts() -> None:
    """The last one that stands as a word."""
    marks = {"A": 1.0, "B": 0.0, "C": 0.5}
    made: list[tuple[str, str | None]] = [
        (form.format(one, other=other), one)
        for form, one, other in product(VERDICTS, marks, marks)
        if one != other
    ]
    made += [(text, None) for text in ("", "D", "AB", "a", "Both", "BA", "Cat", "<think>A</think>")]
    for flip in (None, {"order": "ba"}):
        step = Verdict(marks=marks, flip=flip)
        for text, verdict in made:
            mark = None if verdict is None else marks[verdict]
            mark = 1 - mark if mark is not None and flip else mark
            found = step.apply(AnswerRow(text, {"order": "ba"}, {}))
            assert found == {"verdict": verdict, "mark": mark}, text
    assert len(made) >= 70


SCORES: tuple[str, ...] = (
    "Score: {}",
    "rating: {}",
    "The score is {}.",
    "**Score:** {}/10",
    "score = {}",
    "评分：{}",
)
SCORES += (
    "Rating is **{}**",
    "grade: {} because it is short",
    '{{"score": {}}}',
    "Score [1-10]: {}",
)


def test_scores_of_judges() -> None:
    made: list[tuple[str, float | None]] = [
        (form.format(number), float(number)) for form in SCORES for number in range(11)
    ]
    made += [(form.format(number), None) for form in SCORES for number in (70, -3)]
    for text, score in made:
        assert ParseScore().apply(AnswerRow(text, {}, {}))["score"] == score, text
    assert len(made) >= 100


def test_scores_of_choices() -> None:
    """The expected value, the probability of one choice, and of the right ones."""
    count = 0
    for first, second in product(range(11), range(11)):
        if first + second > 10:
            continue
        count += 3
        scores = [first / 10, second / 10, (10 - first - second) / 10]
        row = AnswerRow("", {"choice_scores": scores, "labels": [0, 1, 0]}, {})
        expected = ChoiceScore(choices=("1", "2", "3")).apply(row)["score"]
        assert expected == pytest.approx((first + 2 * second + 3 * (10 - first - second)) / 10)
        named = ChoiceScore(choices=("a", "b", "c"), choice="b").apply(row)["score"]
        assert named == second / 10
        of_row = ChoiceScore(labels="labels").apply(row)
        is_first = first >= max(second, 10 - first - second)
        is_best = not is_first and second >= 10 - first - second
        assert of_row == {"score": second / 10, "mark": float(is_best)}
    assert count >= 100


def test_majorities() -> None:
    """Every combination of marks that three judges can give, or leave out."""
    marks = (0.0, 0.5, 1.0, None)
    step = Majority(marks=("a", "b"), own="c")
    made = list(product(marks, repeat=3))
    for a, b, c in made:
        found = step.apply(AnswerRow("", {"a": a, "b": b}, {"c": c}))["mark"]
        given = [mark for mark in (a, b, c) if mark is not None]
        twice = [mark for mark in given if given.count(mark) > 1]
        assert found == next(iter(twice or given), None)
    median = Majority(marks=("a", "b"), own="c", by="median")
    for a, b, c in made:
        found = median.apply(AnswerRow("", {"a": a, "b": b}, {"c": c}))["mark"]
        given = sorted(mark for mark in (a, b, c) if mark is not None)
        if len(given) == 2:
            assert found == sum(given) / 2
        else:
            assert found == (given[len(given) // 2] if given else None)
    assert 2 * len(made) >= 100
