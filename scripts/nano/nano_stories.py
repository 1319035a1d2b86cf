"""Templates of word problems for the nano models: two steps each; numbers and words are drawn."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from random import Random

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
