"""The nodes of a parsed mathematical answer, which the parser makes and `normal_forms.py` reads."""

from __future__ import annotations

from dataclasses import dataclass
from fractions import Fraction


@dataclass(frozen=True, slots=True)
class Number:
    """A rational number with the exact value that was written."""

    value: Fraction


@dataclass(frozen=True, slots=True)
class Symbol:
    """A variable, a constant such as `pi`, `e` and `i`, or the name of a thing (`AB`, `f(x)`)."""

    name: str


@dataclass(frozen=True, slots=True)
class Call:
    """An operation on expressions: `+`, `*`, `/`, `^`, `negate`, or a function by its name."""

    name: str
    arguments: tuple[Node, ...]


@dataclass(frozen=True, slots=True)
class Based:
    """A number whose base is written, such as `101_2`."""

    digits: str
    base: int


@dataclass(frozen=True, slots=True)
class Quantity:
    """A value with a unit of measure (`18 cm^2`), or of money (`$18`).

    Attributes:
        value: the value as it was written.
        unit: the base unit.
        size: the size of the written unit in base units: 60 for minutes, with `s` as the unit.
    """

    value: Node
    unit: str
    size: Fraction = Fraction(1)

    @property
    def measured(self) -> Node:
        """The value in base units."""
        return self.value if self.size == 1 else Call("*", (Number(self.size), self.value))


@dataclass(frozen=True, slots=True)
class Words:
    """Text that is not mathematics, such as a name."""

    text: str


@dataclass(frozen=True, slots=True)
class Ratio:
    """Two or more values with colons between them."""

    items: tuple[Node, ...]


@dataclass(frozen=True, slots=True)
class Bracketed:
    """Items in brackets: a point, a vector, an interval (its two brackets say which) or a set
    (`{`)."""

    opening: str
    items: tuple[Node, ...]
    closing: str


@dataclass(frozen=True, slots=True)
class Matrix:
    """The rows of a matrix."""

    rows: tuple[tuple[Node, ...], ...]


@dataclass(frozen=True, slots=True)
class SetOperation:
    """The union (`|`), intersection (`&`) or difference (`-`) of two sets."""

    name: str
    left: Node
    right: Node


@dataclass(frozen=True, slots=True)
class Builder:
    """The set of all values of a variable for which conditions hold."""

    variable: Node
    condition: Node


@dataclass(frozen=True, slots=True)
class Relation:
    """A chain of sides with relations between them, such as `0 < x <= 1`.

    The relations are `=`, `!=`, `<`, `<=`, `>`, `>=`, `~` (about), `in`, or the name of a command.
    """

    sides: tuple[Node, ...]
    names: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class AnswerList:
    """Answers one after another, joined by `,`, `;`, `and` or `or`."""

    items: tuple[Node, ...]
    joined: str


@dataclass(frozen=True, slots=True)
class LetterChoice:
    """The letter of a choice and its text, such as `(B) 5`."""

    letter: str
    text: Node


Node = (
    Number | Symbol | Call | Based | Quantity | Words | Ratio | Bracketed | Matrix
    | SetOperation | Builder | Relation | AnswerList | LetterChoice
)  # fmt: skip


class NotRead(Exception):
    """The text is not mathematics that is understood here."""


CONSTANTS = frozenset(("pi", "e", "i", "oo"))
"""Names of symbols that are not variables."""


def variables_of(node: Node) -> set[str]:
    """The names of the variables of an expression."""
    if isinstance(node, Symbol):
        return set() if node.name in CONSTANTS else {node.name}
    if isinstance(node, Call):
        return set().union(*map(variables_of, node.arguments))
    return set()
