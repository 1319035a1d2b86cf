"""The problems for the nano models: right answers, a held-out split, the same on every run."""

from __future__ import annotations

import json
import re
from collections import Counter
from collections.abc import Callable
from itertools import islice

import nano_problems
import pytest
from nano_problems import (
    FORMS,
    KINDS,
    ONE_IN,
    SCHEMA,
    Form,
    Problem,
    Split,
    final_number,
    held_out_set,
    problems,
)

COUNT = 3000
SPLITS: tuple[Split, Split] = ("train", "held_out")
# Written from what the questions say, by their numbers in order of reading.
RESULTS: dict[str, Callable[..., float]] = {
    "add": lambda a, b: a + b,
    "subtract": lambda a, b: a - b,
    "multiply": lambda a, b: a * b,
    "a+b-c": lambda had, got, lost: had + got - lost,
    "a-b+c": lambda had, gave, found: had - gave + found,
    "a*b-c": lambda boxes, each, taken: boxes * each - taken,
    "a*b+c": lambda things, price, bag: things * price + bag,
    "a+(a+b)": lambda one, more: one + one + more,
    "a+a*b": lambda one, times: one + one * times,
    "(a-b)/c": lambda had, lost, friends: (had - lost) / friends,
    "(a+b)*c": lambda red, blue, days: (red + blue) * days,
}


@pytest.fixture(scope="module")
def train() -> list[Problem]:
    return list(islice(problems("train", 0), COUNT))


@pytest.fixture(scope="module")
def held_out() -> list[Problem]:
    return held_out_set(500, 0)


def numbers(text: str) -> list[int]:
    return [int(number) for number in re.findall(r"\d+", text)]


def computed(problem: Problem) -> tuple[object, ...]:
    """What is computed, whatever the words and the order of two terms or factors."""
    values = numbers(problem.question)
    return problem.kind, *(sorted(values) if problem.kind in ("add", "multiply") else values)


def test_the_final_number_is_the_one_that_the_question_asks_for(
    train: list[Problem], held_out: list[Problem]
) -> None:
    assert set(RESULTS) == set(KINDS)
    for problem in (*train, *held_out):
        assert problem.final == RESULTS[problem.kind](*numbers(problem.question)), problem
        assert {final_number(problem.answer(form), form) for form in FORMS} == {problem.final}


def test_every_step_of_the_working_is_true(train: list[Problem]) -> None:
    for problem in train:
        steps = re.findall(r"([\d+*/-]+)=(\d+)", problem.working)
        assert len(steps) == problem.working.count("=") >= 2
        for term, result in steps:
            assert eval(term) == int(result) >= 0, problem
        if problem.kind not in ("add", "subtract"):
            assert int(steps[-1][1]) == problem.final


def test_the_digits_of_the_working_make_the_final_number(train: list[Problem]) -> None:
    for problem in train:
        if problem.kind not in ("add", "subtract"):
            continue
        results = re.findall(r"=(\d+)", problem.working)
        digits = [results[-1], *(result[-1] for result in results[-2::-1])]
        assert int("".join(digits)) == problem.final, problem


def test_no_held_out_problem_is_in_training(train: list[Problem], held_out: list[Problem]) -> None:
    assert not {computed(problem) for problem in train} & {computed(p) for p in held_out}
    other_seed = islice(problems("train", 1), COUNT)
    assert not {computed(problem) for problem in other_seed} & {computed(p) for p in held_out}


def test_a_sum_is_on_the_same_side_in_either_order(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(nano_problems, "_up_to_3_digits", lambda random: random.randint(10, 20))
    sums = [
        {computed(p) for p in islice(problems(split, 0), 2000) if p.kind == "add"}
        for split in SPLITS
    ]
    assert all(sums) and not sums[0] & sums[1]


def test_the_held_out_share_of_the_multiplications() -> None:
    seen = {
        split: {computed(p) for p in islice(problems(split, 0), count) if p.kind == "multiply"}
        for split, count in zip(SPLITS, (16000, 4500), strict=True)
    }
    assert not seen["train"] & seen["held_out"]
    assert 0.5 < len(seen["held_out"]) * ONE_IN / (8 * 90) < 1.5


def test_a_stream_is_the_same_on_every_run_and_other_with_another_seed(
    train: list[Problem],
) -> None:
    assert list(islice(problems("train", 0), COUNT)) == train
    assert list(islice(problems("train", 1), 50)) != train[:50]
    assert train[0] == Problem(
        kind="a*b-c",
        question="There are 8 boxes with 10 buns in each. Paul takes 7. How many are left?",
        working="8 boxes hold 8*10=80 buns, then 80-7=73.",
        final=73,
    )


def test_the_held_out_set_has_every_kind_and_no_question_twice(held_out: list[Problem]) -> None:
    assert len({problem.question for problem in held_out}) == 500
    assert {problem.kind for problem in held_out} == set(KINDS)


def test_every_kind_is_drawn_equally_often(train: list[Problem]) -> None:
    counts = Counter(problem.kind for problem in train)
    assert set(counts) == set(KINDS)
    for kind, count in counts.items():
        assert 0.75 < count * len(KINDS) / COUNT < 1.25, kind


def test_no_pair_of_the_kind_a_plus_a_times_b_need_be_learned_by_heart() -> None:
    pairs = {computed(p) for p in islice(problems("train", 0), 60_000) if p.kind == "a+a*b"}
    assert len(pairs) > 240


def test_the_answer_in_json_is_compact_and_what_the_schema_says(train: list[Problem]) -> None:
    for problem in train:
        text = problem.answer("json")
        row = json.loads(text)
        assert list(row) == SCHEMA["required"] == ["working", "answer"]
        assert (type(row["working"]), type(row["answer"])) == (str, int)
        assert text == f'{{"working":"{problem.working}","answer":{problem.final}}}'
        assert problem.answer("plain") == f"{row['working']} Answer: {row['answer']}"
        assert problem.request("json") == f"{problem.request('plain')} Answer in JSON."


@pytest.mark.parametrize(("form", "longest"), [("plain", 75), ("json", 90)])
def test_lengths_suit_a_small_model(train: list[Problem], form: Form, longest: int) -> None:
    assert {20 <= len(problem.answer(form)) <= longest for problem in train} == {True}


@pytest.mark.parametrize(
    ("answer", "number"),
    [
        ("1+1=2. Answer: 2", 2),
        ("Answer: 1, no. Answer: 2 ", 2),
        ("2", None),
        ("Answer: x2", None),
        ("", None),
    ],
)
def test_the_final_number_stands_after_the_last_answer(answer: str, number: int | None) -> None:
    assert final_number(answer, "plain") == number


@pytest.mark.parametrize(
    ("answer", "number"),
    [
        ('{"working":"1+1=2.","answer":2}', 2),
        ('{"answer": 2}', 2),
        ('{"answer":"2"}', None),
        ('{"answer":2.0}', None),
        ('{"answer":true}', None),
        ('{"working":"2"}', None),
        ('{"answer":2', None),
        ("[2]", None),
        ("2", None),
        ("1+1=2. Answer: 2", None),
    ],
)
def test_the_final_number_is_an_integer_of_the_json_object(answer: str, number: int | None) -> None:
    assert final_number(answer, "json") == number
