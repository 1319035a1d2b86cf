"""Arithmetic and two-step word problems with worked answers, for the model nano_sdar.

Training and held-out problems never share a problem: the hash of what is computed (the form and
its numbers, not the names, the things or the phrasing around them) decides the split.

    python scripts/nano_problems.py --split held_out --count 500 > eval.jsonl
"""

from __future__ import annotations

import argparse
import hashlib
import json
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from random import Random
from typing import Literal

Split = Literal["train", "held_out"]

ONE_IN = 8
"""One problem in so many is held out."""

_NAMES = (
    "Alex", "Amy", "Ben", "Cleo", "Dan", "Emma", "Finn", "Gina", "Hugo", "Iris", "Jack", "Kim",
    "Leo", "Maya", "Nora", "Omar", "Paul", "Rosa", "Sam", "Tara", "Uma", "Vera", "Will", "Zoe",
)  # fmt: skip
_THINGS = (
    "apples", "balls", "beads", "books", "buns", "cakes", "cards", "coins", "cups", "eggs", "figs",
    "hats", "kites", "lemons", "nuts", "pears", "pens", "plums", "shells", "stamps", "toys",
)  # fmt: skip


@dataclass(frozen=True, slots=True)
class Problem:
    """Attributes:
    kind: `add`, `subtract`, `multiply`, or the form of a word problem, such as `a+b-c`.
    answer: the working in short steps; its last words are `Answer: ` and the number.
    final: that number.
    """

    kind: str
    question: str
    answer: str
    final: str


@dataclass(frozen=True, slots=True)
class _Story:
    """A word problem of two steps.

    Attributes:
        draw: the numbers a, b and c; c is 0 where the story has only two.
        solve: the results s and t of the two steps.
        working: both steps, without the full stop.
    """

    form: str
    draw: Callable[[Random], tuple[int, int, int]]
    solve: Callable[[int, int, int], tuple[int, int]]
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


def _draw_shares(random: Random) -> tuple[int, int, int]:
    each, friends, lost = random.randint(2, 12), random.randint(2, 9), random.randint(1, 30)
    return each * friends + lost, lost, friends


_STORIES = (
    _Story(
        "a+b-c",
        _draw_gain,
        lambda a, b, c: (a + b, a + b - c),
        "{name} has {a} {things} and gets {b} more from {other}. Then {name} loses {c}. "
        "How many {things} are left?",
        "{name} has {a}+{b}={s} {things}, then {s}-{c}={t}",
    ),
    _Story(
        "a-b+c",
        _draw_loss,
        lambda a, b, c: (a - b, a - b + c),
        "{name} has {a} {things}, gives {b} to {other} and finds {c} more. "
        "How many {things} does {name} have now?",
        "{name} keeps {a}-{b}={s} {things}, then {s}+{c}={t}",
    ),
    _Story(
        "a*b-c",
        _draw_boxes,
        lambda a, b, c: (a * b, a * b - c),
        "There are {a} boxes with {b} {things} in each. {name} takes {c}. "
        "How many {things} are left?",
        "{a} boxes hold {a}*{b}={s} {things}, then {s}-{c}={t}",
    ),
    _Story(
        "a*b+c",
        lambda r: (r.randint(2, 9), r.randint(2, 12), r.randint(2, 30)),
        lambda a, b, c: (a * b, a * b + c),
        "{name} buys {a} {things} for {b} dollars each and a bag for {c} dollars. "
        "How many dollars is that?",
        "{a} {things} cost {a}*{b}={s}, then {s}+{c}={t}",
    ),
    _Story(
        "a+(a+b)",
        lambda r: (r.randint(2, 60), r.randint(2, 39), 0),
        lambda a, b, c: (a + b, a + a + b),
        "{name} has {a} {things}. {other} has {b} more than {name}. "
        "How many {things} do they have together?",
        "{other} has {a}+{b}={s} {things}, then {a}+{s}={t}",
    ),
    _Story(
        "a+a*b",
        lambda r: (r.randint(2, 40), r.randint(2, 6), 0),
        lambda a, b, c: (a * b, a + a * b),
        "{name} has {a} {things}. {other} has {b} times as many. "
        "How many {things} do they have together?",
        "{other} has {a}*{b}={s} {things}, then {a}+{s}={t}",
    ),
    _Story(
        "(a-b)/c",
        _draw_shares,
        lambda a, b, c: (a - b, (a - b) // c),
        "{name} has {a} {things}, loses {b} and shares the rest with {c} friends. "
        "How many {things} does each friend get?",
        "{name} has {a}-{b}={s} {things}, then {s}/{c}={t}",
    ),
    _Story(
        "(a+b)*c",
        lambda r: (r.randint(1, 9), r.randint(1, 9), r.randint(2, 9)),
        lambda a, b, c: (a + b, (a + b) * c),
        "{name} makes {a} red and {b} blue {things} a day. How many {things} is that in {c} days?",
        "A day is {a}+{b}={s} {things}, then {s}*{c}={t}",
    ),
)
KINDS = ("add", "subtract", "multiply", *(story.form for story in _STORIES))


def problems(split: Split, seed: int) -> Iterator[Problem]:
    """An endless stream, the same for the same arguments; half of them are word problems."""
    random = Random(f"{split} {seed}")
    makers = (_addition, _subtraction, _multiplication)
    while True:
        word = random.random() < 0.5
        key, problem = _word_problem(random) if word else random.choice(makers)(random)
        if is_held_out(key) == (split == "held_out"):
            yield problem


def held_out_set(count: int, seed: int) -> list[Problem]:
    """Held-out problems, no question twice."""
    found: dict[str, Problem] = {}
    for problem in problems("held_out", seed):
        found.setdefault(problem.question, problem)
        if len(found) == count:
            break
    return list(found.values())


def is_held_out(key: str) -> bool:
    """key: the form of a problem and its numbers, those of a sum or a product in order of size."""
    return int.from_bytes(hashlib.sha256(key.encode()).digest()[:8], "big") % ONE_IN == 0


def final_number(answer: str) -> str | None:
    """What stands after the last `Answer: `; None if there is none."""
    _, found, number = answer.rpartition("Answer: ")
    return number.strip() if found else None


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


def _word_problem(random: Random) -> tuple[str, Problem]:
    story = random.choice(_STORIES)
    a, b, c = story.draw(random)
    s, t = story.solve(a, b, c)
    name, other = random.sample(_NAMES, 2)
    fields: dict[str, object] = {
        "a": a,
        "b": b,
        "c": c,
        "s": s,
        "t": t,
        "name": name,
        "other": other,
    }
    fields["things"] = random.choice(_THINGS)
    # Two openings, so that a block has several right answers: its tokens must agree.
    opening = "First " if random.random() < 0.5 else ""
    answer = f"{opening}{story.working.format(**fields)}. Answer: {t}"
    problem = Problem(story.form, story.question.format(**fields), answer, str(t))
    return f"{story.form} {a} {b} {c}", problem


def _arithmetic(random: Random, kind: str, text: str, steps: list[str], result: int) -> Problem:
    question = random.choice(("What is {}?", "Calculate {}.", "{} = ?")).format(text)
    return Problem(kind, question, f"{', '.join(steps)}. Answer: {result}", str(result))


def _up_to_3_digits(random: Random) -> int:
    return random.randint(100, 999) if random.random() < 0.7 else random.randint(10, 99)


def _digits(number: int, other: int) -> list[int]:
    """The ones first, with zeros up to the length of the longer number."""
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
    """A line of a data set: id, kind, question, answer and final."""
    return json.dumps({"id": f"{problem.kind}-{index}", **asdict(problem)})


class _Formatter(argparse.ArgumentDefaultsHelpFormatter, argparse.RawDescriptionHelpFormatter):
    pass


if __name__ == "__main__":
    main()
