"""Arithmetic and two-step word problems with worked answers, for nano_sdar and nano_hybrid.

A problem has two forms, plain text and JSON, which differ in the request and in the answer:

    What is 2 * 10?                   2*10=20, 2*0=0, 20+0=20. Answer: 20
    What is 2 * 10? Answer in JSON.   {"working":"2*10=20, 2*0=0, 20+0=20.","answer":20}
"""

from __future__ import annotations

import hashlib
import itertools
import json
from collections.abc import Callable, Iterator
from random import Random
from typing import NamedTuple

from nano_learning import Batch, chat, pad

SEQUENCE_LENGTH = 192
"""Tokens of a sequence: room for the longest problem and its answer, in either form."""


class Problem(NamedTuple):
    """An arithmetic problem. Its kind is `add`, `subtract`, `multiply`, or a formula such as
    `a+b-c`."""

    kind: str
    question: str
    working: str
    final: int

    def texts(self, as_json: bool) -> tuple[str, str]:
        """Return the user's message and the expected answer."""
        if not as_json:
            return self.question, f"{self.working} Answer: {self.final}"
        answer = json.dumps({"working": self.working, "answer": self.final}, separators=(",", ":"))
        return f"{self.question} Answer in JSON.", answer


class Story(NamedTuple):
    """A word problem: how its numbers a, b and c are drawn, the result s of its first step and t of
    its second, and what it asks and answers, with these and other names in braces."""

    draw: Callable[[Callable[[int, int], int]], tuple[int, int, int]]
    results: Callable[[int, int, int], tuple[int, int]]
    question: str
    working: str


# fmt: off
STORIES = {
    "a+b-c": Story(lambda r: (a := r(2, 60), b := r(2, 39), r(1, a + b - 1)),
        lambda a, b, c: (a + b, a + b - c),
        "{name} has {a} {things}, gets {b} from {other} and then loses {c}. How many are left?",
        "{name} has {a}+{b}={s} {things}, then {s}-{c}={t}"),
    "a-b+c": Story(lambda r: (a := r(4, 99), r(2, a - 2), r(2, 60)),
        lambda a, b, c: (a - b, a - b + c),
        "{name} has {a} {things}, gives {b} to {other} and finds {c}. How many are there now?",
        "{name} keeps {a}-{b}={s} {things}, then {s}+{c}={t}"),
    "a*b-c": Story(lambda r: (a := r(2, 9), b := r(2, 12), r(1, a * b - 1)),
        lambda a, b, c: (a * b, a * b - c),
        "There are {a} boxes with {b} {things} in each. {name} takes {c}. How many are left?",
        "{a} boxes hold {a}*{b}={s} {things}, then {s}-{c}={t}"),
    "a*b+c": Story(lambda r: (r(2, 9), r(2, 12), r(2, 30)),
        lambda a, b, c: (a * b, a * b + c),
        "{name} buys {a} {things} for {b} dollars each and a bag for {c}. How much is that?",
        "{a} {things} cost {a}*{b}={s}, then {s}+{c}={t}"),
    "a+(a+b)": Story(lambda r: (r(2, 80), r(2, 60), 0),
        lambda a, b, c: (a + b, a + a + b),
        "{name} has {a} {things}. {other} has {b} more than {name}. How many do they have?",
        "{other} has {a}+{b}={s} {things}, then {a}+{s}={t}"),
    # The tens and the ones apart: too many products have two digits to know them by heart.
    "a+a*b": Story(lambda r: (r(10, min(99, 200 // (b := r(2, 9)))), b, 0),
        lambda a, b, c: (a * b, a + a * b),
        "{name} has {a} {things}, {other} {b} times as many. How many do they have?",
        "{other} has {b}*{tens}={x}, {b}*{ones}={y}, {x}+{y}={s}, then {a}+{s}={t}"),
    "(a-b)/c": Story(lambda r: (r(2, 12) * (c := r(2, 9)) + (b := r(1, 30)), b, c),
        lambda a, b, c: (a - b, (a - b) // c),
        "{name} has {a} {things}, loses {b} and splits the rest into {c} bags. How many in each?",
        "{name} has {a}-{b}={s} {things}, then {s}/{c}={t}"),
    "(a+b)*c": Story(lambda r: (r(1, 9), r(1, 9), r(2, 9)),
        lambda a, b, c: (a + b, (a + b) * c),
        "{name} makes {a} red and {b} blue {things} a day. How many is that in {c} days?",
        "A day is {a}+{b}={s} {things}, then {s}*{c}={t}"),
}
# fmt: on
NAMES = (
    "Alex Amy Ben Cleo Dan Emma Finn Gina Hugo Iris Jack Kim Leo Maya Nora Omar Paul Rosa Sam Tara "
    "Uma Vera Will Zoe"
).split()
THINGS = (
    "apples balls beads books buns cakes cards coins cups eggs figs hats kites lemons nuts pears "
    "pens plums shells stamps toys"
).split()


def problems(split: str, seed: str) -> Iterator[Problem]:
    """Yield problems of `train` or `held_out` without end, all kinds equally often."""
    random = Random(f"{split} {seed}")
    kinds = {"add": _addition, "subtract": _subtraction, "multiply": _multiplication}
    while True:
        kind = random.choice((*kinds, *STORIES))
        key, problem = kinds[kind](random) if kind in kinds else _story(random, kind)
        if is_held_out(key) == (split == "held_out"):
            yield problem


def is_held_out(key: str) -> bool:
    """Return whether the problem with this key is held out, as one in eight is.

    The key is the problem's kind and its numbers; for a sum or a product the numbers are sorted.
    """
    return int.from_bytes(hashlib.sha256(key.encode()).digest()[:8], "big") % 8 == 0


def sum_steps(a: int, b: int) -> list[str]:
    """Return the steps of a sum of two numbers, a step for each digit, from the ones on."""
    steps, carry = [], 0
    for x, y in _digits(a, b):
        total = x + y + carry
        steps.append(f"{x}+{y}{'+1' if carry else ''}={total}")
        carry = total // 10
    return steps


def _addition(random: Random) -> tuple[str, Problem]:
    """Draw a sum of two numbers, and return its key (`is_held_out`) and the problem."""
    a, b = _up_to_3_digits(random), _up_to_3_digits(random)
    low, high = sorted((a, b))
    return f"{low}+{high}", _arithmetic(random, "add", f"{a} + {b}", sum_steps(a, b), a + b)


def _subtraction(random: Random) -> tuple[str, Problem]:
    """Draw a difference that is not negative, and return its key and the problem."""
    b, a = sorted((_up_to_3_digits(random), _up_to_3_digits(random)))
    steps, borrow = [], 0
    for x, y in _digits(a, b):
        x -= borrow
        borrow = int(x < y)
        x += 10 * borrow
        steps.append(f"{x}-{y}={x - y}")
    return f"{a}-{b}", _arithmetic(random, "subtract", f"{a} - {b}", steps, a - b)


def _multiplication(random: Random) -> tuple[str, Problem]:
    """Draw a product of numbers of one and two digits, and return its key and the problem."""
    a, b = random.randint(2, 9), random.randint(10, 99)
    tens, ones = a * (b - b % 10), a * (b % 10)
    steps = [f"{a}*{b - b % 10}={tens}", f"{a}*{b % 10}={ones}", f"{tens}+{ones}={tens + ones}"]
    text = f"{a} * {b}" if random.random() < 0.5 else f"{b} * {a}"
    return f"{a}*{b}", _arithmetic(random, "multiply", text, steps, a * b)


def _story(random: Random, kind: str) -> tuple[str, Problem]:
    """Draw a word problem of a kind of `STORIES`, and return its key and the problem."""
    story = STORIES[kind]
    a, b, c = story.draw(random.randint)
    name, other = random.sample(NAMES, 2)
    s, t = story.results(a, b, c)
    tens, ones = a - a % 10, a % 10
    fields = {
        "name": name, "other": other, "things": random.choice(THINGS), "a": a, "b": b, "c": c,
        "s": s, "t": t, "tens": tens, "ones": ones, "x": b * tens, "y": b * ones,
    }  # fmt: skip
    # With two openings a block has several right answers, and its tokens must agree on one.
    opening = "First " if random.random() < 0.5 else ""
    working = f"{opening}{story.working.format(**fields)}."
    return f"{kind} {a} {b} {c}", Problem(kind, story.question.format(**fields), working, t)


def _arithmetic(random: Random, kind: str, text: str, steps: list[str], result: int) -> Problem:
    """Make a problem that asks for `text`, such as "2 + 3", in one of three wordings."""
    question = random.choice(("What is {}?", "Calculate {}.", "{} = ?")).format(text)
    return Problem(kind, question, f"{', '.join(steps)}.", result)


def _up_to_3_digits(random: Random) -> int:
    return random.randint(100, 999) if random.random() < 0.7 else random.randint(10, 99)


def _digits(a: int, b: int) -> Iterator[tuple[int, int]]:
    """Pair the digits of two numbers, the ones first, with zeros up to the longer one's length."""
    for place in range(len(str(max(a, b)))):
        yield a // 10**place % 10, b // 10**place % 10


def make_batch(seed: int, step: int, rows: int) -> Batch:
    """Draw the rows of a step, alternating between the two forms of a problem."""
    stream = itertools.islice(problems("train", f"{seed}.{step}"), rows)
    texts = [problem.texts(as_json=index % 2 == 1) for index, problem in enumerate(stream)]
    return pad([chat(request.encode(), answer) for request, answer in texts], SEQUENCE_LENGTH)
