"""Arithmetic and two-step word problems with worked answers, for the nano models.

A problem has two forms, plain text and JSON, which differ in the request and in the answer:

    What is 2 * 10?                   2*10=20, 2*0=0, 20+0=20. Answer: 20
    What is 2 * 10? Answer in JSON.   {"working":"2*10=20, 2*0=0, 20+0=20.","answer":20}

A hash of what is computed, its kind and its numbers alone, decides whether a problem is held out.
"""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from random import Random
from typing import Literal

Split = Literal["train", "held_out"]
Form = Literal["plain", "json"]
FORMS: tuple[Form, Form] = ("plain", "json")

SCHEMA = {
    "type": "object",
    "properties": {"working": {"type": "string"}, "answer": {"type": "integer"}},
    "required": ["working", "answer"],
    "additionalProperties": False,
}
"""The JSON Schema of an answer in JSON. Training answers have no spaces and keys in this order."""


@dataclass(frozen=True, slots=True)
class Problem:
    """A problem with its answer.

    Attributes:
        kind: `add`, `subtract`, `multiply`, or what a word problem computes, such as `a+b-c`.
        question: the text of the problem.
        working: the short steps to the answer, with a full stop.
        final: the number that is asked for.
    """

    kind: str
    question: str
    working: str
    final: int

    def request(self, form: Form) -> str:
        """Return the user's message."""
        return f"{self.question} Answer in JSON." if form == "json" else self.question

    def answer(self, form: Form) -> str:
        """Return the text of the answer: the working, and then the final number."""
        if form == "plain":
            return f"{self.working} Answer: {self.final}"
        return json.dumps({"working": self.working, "answer": self.final}, separators=(",", ":"))


NAMES = (
    "Alex", "Amy", "Ben", "Cleo", "Dan", "Emma", "Finn", "Gina", "Hugo", "Iris", "Jack", "Kim",
    "Leo", "Maya", "Nora", "Omar", "Paul", "Rosa", "Sam", "Tara", "Uma", "Vera", "Will", "Zoe",
)  # fmt: skip
THINGS = (
    "apples", "balls", "beads", "books", "buns", "cakes", "cards", "coins", "cups", "eggs", "figs",
    "hats", "kites", "lemons", "nuts", "pears", "pens", "plums", "shells", "stamps", "toys",
)  # fmt: skip


@dataclass(frozen=True, slots=True)
class Story:
    """A word problem of two steps.

    Attributes:
        form: what it computes, such as `a+b-c`.
        draw: draws the numbers a, b and c; c is 0 if the story has only two.
        solve: computes from a, b and c the other numbers that the working names; t is the result.
        question: a template with the fields a, b, c, name, other and things.
        working: a template with these fields and those of `solve`, without the full stop.
    """

    form: str
    draw: Callable[[Random], tuple[int, int, int]]
    solve: Callable[[int, int, int], dict[str, int]]
    question: str
    working: str


def _draw_gain(random: Random) -> tuple[int, int, int]:
    a, b = random.randint(2, 60), random.randint(2, 39)
    return a, b, random.randint(1, a + b - 1)


def _draw_loss(random: Random) -> tuple[int, int, int]:
    a = random.randint(4, 99)
    return a, random.randint(2, a - 2), random.randint(2, 60)


def _draw_boxes(random: Random) -> tuple[int, int, int]:
    a, b = random.randint(2, 9), random.randint(2, 12)
    return a, b, random.randint(1, a * b - 1)


def _draw_times(random: Random) -> tuple[int, int, int]:
    times = random.randint(2, 9)
    return random.randint(10, min(99, 200 // times)), times, 0


def _draw_shares(random: Random) -> tuple[int, int, int]:
    each, friends, lost = random.randint(2, 12), random.randint(2, 9), random.randint(1, 30)
    return each * friends + lost, lost, friends


def _solve_times(a: int, b: int, c: int) -> dict[str, int]:
    """The tens and the ones apart: too many products have two digits to know them by heart."""
    tens, ones = a - a % 10, a % 10
    steps = {"tens": tens, "ones": ones, "x": b * tens, "y": b * ones}
    return {**steps, "s": a * b, "t": a + a * b}


STORIES = (
    Story(
        "a+b-c",
        _draw_gain,
        lambda a, b, c: {"s": a + b, "t": a + b - c},
        "{name} has {a} {things}, gets {b} from {other} and then loses {c}. How many are left?",
        "{name} has {a}+{b}={s} {things}, then {s}-{c}={t}",
    ),
    Story(
        "a-b+c",
        _draw_loss,
        lambda a, b, c: {"s": a - b, "t": a - b + c},
        "{name} has {a} {things}, gives {b} to {other} and finds {c}. How many are there now?",
        "{name} keeps {a}-{b}={s} {things}, then {s}+{c}={t}",
    ),
    Story(
        "a*b-c",
        _draw_boxes,
        lambda a, b, c: {"s": a * b, "t": a * b - c},
        "There are {a} boxes with {b} {things} in each. {name} takes {c}. How many are left?",
        "{a} boxes hold {a}*{b}={s} {things}, then {s}-{c}={t}",
    ),
    Story(
        "a*b+c",
        lambda r: (r.randint(2, 9), r.randint(2, 12), r.randint(2, 30)),
        lambda a, b, c: {"s": a * b, "t": a * b + c},
        "{name} buys {a} {things} for {b} dollars each and a bag for {c}. How much is that?",
        "{a} {things} cost {a}*{b}={s}, then {s}+{c}={t}",
    ),
    Story(
        "a+(a+b)",
        lambda r: (r.randint(2, 80), r.randint(2, 60), 0),
        lambda a, b, c: {"s": a + b, "t": a + a + b},
        "{name} has {a} {things}. {other} has {b} more than {name}. How many do they have?",
        "{other} has {a}+{b}={s} {things}, then {a}+{s}={t}",
    ),
    Story(
        "a+a*b",
        _draw_times,
        _solve_times,
        "{name} has {a} {things}, {other} {b} times as many. How many do they have?",
        "{other} has {b}*{tens}={x}, {b}*{ones}={y}, {x}+{y}={s}, then {a}+{s}={t}",
    ),
    Story(
        "(a-b)/c",
        _draw_shares,
        lambda a, b, c: {"s": a - b, "t": (a - b) // c},
        "{name} has {a} {things}, loses {b} and splits the rest into {c} bags. How many in each?",
        "{name} has {a}-{b}={s} {things}, then {s}/{c}={t}",
    ),
    Story(
        "(a+b)*c",
        lambda r: (r.randint(1, 9), r.randint(1, 9), r.randint(2, 9)),
        lambda a, b, c: {"s": a + b, "t": (a + b) * c},
        "{name} makes {a} red and {b} blue {things} a day. How many is that in {c} days?",
        "A day is {a}+{b}={s} {things}, then {s}*{c}={t}",
    ),
)


KINDS = ("add", "subtract", "multiply", *(story.form for story in STORIES))


def problems(split: Split, seed: int) -> Iterator[Problem]:
    """Yield problems without end, all kinds equally often; the same ones for the same arguments."""
    random = Random(f"{split} {seed}")
    makers = {"add": _addition, "subtract": _subtraction, "multiply": _multiplication}
    stories = {story.form: story for story in STORIES}
    while True:
        kind = random.choice(KINDS)
        key, problem = (
            makers[kind](random) if kind in makers else _word_problem(random, stories[kind])
        )
        if is_held_out(key) == (split == "held_out"):
            yield problem


def held_out_set(count: int, seed: int) -> list[Problem]:
    """Return `count` held-out problems with different questions."""
    found: dict[str, Problem] = {}
    for problem in problems("held_out", seed):
        found.setdefault(problem.question, problem)
        if len(found) == count:
            break
    return list(found.values())


def is_held_out(key: str) -> bool:
    """Tell whether the problem with this key is held out, as one in eight is.

    The key is the kind of a problem and its numbers, those of a sum or a product in order of size.
    """
    return int.from_bytes(hashlib.sha256(key.encode()).digest()[:8], "big") % 8 == 0


def final_number(answer: str, form: Form) -> int | None:
    """Read the number behind `Answer: `, or that of a JSON object; None if there is none."""
    if form == "plain":
        found = re.search(r"Answer: *(\d+)\s*$", answer)
        return int(found[1]) if found else None
    try:
        value = json.loads(answer)["answer"]
    except (ValueError, KeyError, TypeError):
        return None
    return value if type(value) is int else None  # True is an int too


def sum_steps(a: int, b: int) -> list[str]:
    """Return the steps of a sum of two numbers, a step for each digit, from the ones on."""
    steps, carry = [], 0
    for x, y in zip(_digits(a, b), _digits(b, a), strict=True):
        total = x + y + carry
        steps.append(f"{x}+{y}{'+1' if carry else ''}={total}")
        carry = total // 10
    return steps


def _addition(random: Random) -> tuple[str, Problem]:
    a, b = _up_to_3_digits(random), _up_to_3_digits(random)
    low, high = sorted((a, b))
    return f"{low}+{high}", _arithmetic(random, "add", f"{a} + {b}", sum_steps(a, b), a + b)


def _subtraction(random: Random) -> tuple[str, Problem]:
    b, a = sorted((_up_to_3_digits(random), _up_to_3_digits(random)))
    steps, borrow = [], 0
    for x, y in zip(_digits(a, b), _digits(b, a), strict=True):
        x -= borrow
        borrow = int(x < y)
        x += 10 * borrow
        steps.append(f"{x}-{y}={x - y}")
    return f"{a}-{b}", _arithmetic(random, "subtract", f"{a} - {b}", steps, a - b)


def _multiplication(random: Random) -> tuple[str, Problem]:
    a, b = random.randint(2, 9), random.randint(10, 99)
    tens, ones = a * (b - b % 10), a * (b % 10)
    steps = [f"{a}*{b - b % 10}={tens}", f"{a}*{b % 10}={ones}", f"{tens}+{ones}={tens + ones}"]
    text = f"{a} * {b}" if random.random() < 0.5 else f"{b} * {a}"
    return f"{a}*{b}", _arithmetic(random, "multiply", text, steps, a * b)


def _word_problem(random: Random, story: Story) -> tuple[str, Problem]:
    a, b, c = story.draw(random)
    name, other = random.sample(NAMES, 2)
    solved = story.solve(a, b, c)
    words = {"name": name, "other": other, "things": random.choice(THINGS)}
    question = story.question.format(a=a, b=b, c=c, **words)
    # With two openings a block has several right answers, and its tokens must agree on one.
    opening = "First " if random.random() < 0.5 else ""
    working = f"{opening}{story.working.format(a=a, b=b, c=c, **words, **solved)}."
    return f"{story.form} {a} {b} {c}", Problem(story.form, question, working, solved["t"])


def _arithmetic(random: Random, kind: str, text: str, steps: list[str], result: int) -> Problem:
    question = random.choice(("What is {}?", "Calculate {}.", "{} = ?")).format(text)
    return Problem(kind, question, f"{', '.join(steps)}.", result)


def _up_to_3_digits(random: Random) -> int:
    return random.randint(100, 999) if random.random() < 0.7 else random.randint(10, 99)


def _digits(number: int, other: int) -> list[int]:
    """Return the digits of `number`, the ones first, with zeros up to the length of `other`."""
    width = len(str(max(number, other)))
    return [int(digit) for digit in reversed(str(number).zfill(width))]


def row_json(index: int, problem: Problem) -> str:
    """Format a line of a data set: id, kind, question, the plain answer, and `final` as text."""
    row = {
        "id": f"{problem.kind}-{index}",
        "kind": problem.kind,
        "question": problem.question,
        "answer": problem.answer("plain"),
        "final": str(problem.final),
    }
    return json.dumps(row)
