"""Arithmetic and two-step word problems with worked answers, for the nano models.

A problem has two forms, plain text and JSON, which differ in the request and in the answer:

    What is 2 * 10?                   2*10=20, 2*0=0, 20+0=20. Answer: 20
    What is 2 * 10? Answer in JSON.   {"working":"2*10=20, 2*0=0, 20+0=20.","answer":20}

No problem is both in the training and in the held-out set: a hash of what is computed decides which
set it is in. That is its kind and its numbers, and not the names, the things, the phrasing or the
form of the answer.

    python scripts/nano/nano_problems.py --split held_out --count 500 > eval.jsonl
"""

from __future__ import annotations

import argparse
import hashlib
import json
from collections.abc import Iterator
from dataclasses import dataclass
from random import Random
from typing import Literal

from nano_stories import NAMES, STORIES, THINGS, Story

Split = Literal["train", "held_out"]
Form = Literal["plain", "json"]
FORMS: tuple[Form, Form] = ("plain", "json")

JSON_REQUEST = " Answer in JSON."
"""What follows the question if the answer is to be JSON."""

SCHEMA = {
    "type": "object",
    "properties": {"working": {"type": "string"}, "answer": {"type": "integer"}},
    "required": ["working", "answer"],
    "additionalProperties": False,
}
"""The JSON Schema of an answer in JSON. Training answers have no spaces and keys in this order."""

ONE_IN = 8
"""One problem out of so many is held out."""


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
        return self.question + JSON_REQUEST if form == "json" else self.question

    def answer(self, form: Form) -> str:
        """Return the text of the answer: the working, and then the final number."""
        if form == "plain":
            return f"{self.working} Answer: {self.final}"
        return json.dumps({"working": self.working, "answer": self.final}, separators=(",", ":"))


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
    """Tell whether the problem with this key is held out.

    The key is the kind of a problem and its numbers, those of a sum or a product in order of size.
    """
    return int.from_bytes(hashlib.sha256(key.encode()).digest()[:8], "big") % ONE_IN == 0


def final_number(answer: str, form: Form) -> int | None:
    """Read the number of an answer; None if it has none.

    It stands after the last `Answer: `, or as `answer` in a JSON object.
    """
    if form == "plain":
        _, found, number = answer.rpartition("Answer: ")
        return int(number) if found and number.strip().isdecimal() else None
    try:
        row = json.loads(answer)
    except json.JSONDecodeError:
        return None
    value = row.get("answer") if isinstance(row, dict) else None
    return value if type(value) is int else None  # True is an int too


def _addition(random: Random) -> tuple[str, Problem]:
    a, b = _up_to_3_digits(random), _up_to_3_digits(random)
    steps, carry = [], 0
    for x, y in zip(_digits(a, b), _digits(b, a), strict=True):
        total = x + y + carry
        steps.append(f"{x}+{y}{'+1' if carry else ''}={total}")
        carry = total // 10
    low, high = sorted((a, b))
    return f"{low}+{high}", _arithmetic(random, "add", f"{a} + {b}", steps, a + b)


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


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=_Formatter)
    parser.add_argument("--split", choices=("train", "held_out"), default="held_out")
    parser.add_argument("--count", type=int, default=500)
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args()
    stream = problems(args.split, args.seed)
    rows = (
        held_out_set(args.count, args.seed)
        if args.split == "held_out"
        else [next(stream) for _ in range(args.count)]
    )
    for index, problem in enumerate(rows):
        print(row_json(index, problem))


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


class _Formatter(argparse.ArgumentDefaultsHelpFormatter, argparse.RawDescriptionHelpFormatter):
    pass


if __name__ == "__main__":
    main()
