"""The problems that nano_sdar learns: right answers, a held-out split, the same on every run."""

from __future__ import annotations

import re
from collections.abc import Callable
from itertools import islice

import nano_problems
import pytest
from nano_problems import KINDS, ONE_IN, Problem, Split, final_number, held_out_set, problems

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
        assert int(problem.final) == RESULTS[problem.kind](*numbers(problem.question)), problem
        assert final_number(problem.answer) == problem.final


def test_every_step_of_the_working_is_true(train: list[Problem]) -> None:
    for problem in train:
        steps = re.findall(r"([\d+*/-]+)=(\d+)", problem.answer)
        assert len(steps) == problem.answer.count("=") >= 2
        for term, result in steps:
            assert eval(term) == int(result) >= 0, problem
        if problem.kind not in ("add", "subtract"):
            assert steps[-1][1] == problem.final


def test_the_digits_of_the_working_make_the_final_number(train: list[Problem]) -> None:
    for problem in train:
        if problem.kind not in ("add", "subtract"):
            continue
        results = re.findall(r"=(\d+)", problem.answer)
        digits = [results[-1], *(result[-1] for result in results[-2::-1])]
        assert int("".join(digits)) == int(problem.final), problem


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
        for split, count in zip(SPLITS, (9000, 2500), strict=True)
    }
    assert not seen["train"] & seen["held_out"]
    assert 0.5 < len(seen["held_out"]) * ONE_IN / (8 * 90) < 1.5


def test_a_stream_is_the_same_on_every_run_and_other_with_another_seed(
    train: list[Problem],
) -> None:
    assert list(islice(problems("train", 0), COUNT)) == train
    assert list(islice(problems("train", 1), 50)) != train[:50]
    assert train[0] == Problem(
        kind="a+b-c",
        question="Gina has 35 plums and gets 36 more from Ben. Then Gina loses 18. "
        "How many plums are left?",
        answer="First Gina has 35+36=71 plums, then 71-18=53. Answer: 53",
        final="53",
    )


def test_the_held_out_set_has_every_kind_and_no_question_twice(held_out: list[Problem]) -> None:
    assert len({problem.question for problem in held_out}) == 500
    assert {problem.kind for problem in held_out} == set(KINDS)


def test_lengths_suit_a_small_model(train: list[Problem]) -> None:
    assert max(len(problem.question) for problem in train) <= 110
    assert {20 <= len(problem.answer) <= 63 for problem in train} == {True}


@pytest.mark.parametrize(
    ("answer", "number"),
    [("1+1=2. Answer: 2", "2"), ("Answer: 1, no. Answer: 2 ", "2"), ("2", None), ("", None)],
)
def test_the_final_number_stands_after_the_last_answer(answer: str, number: str | None) -> None:
    assert final_number(answer) == number
