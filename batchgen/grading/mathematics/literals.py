"""The number that an answer writes down, without anything that must be computed."""

from __future__ import annotations

from fractions import Fraction

from batchgen.grading.mathematics.reading.layout import tidy
from batchgen.grading.mathematics.reading.nodes import (
    Call,
    Choice,
    Node,
    NotRead,
    Number,
    Quantity,
    Relation,
)
from batchgen.grading.mathematics.reading.parser import read
from batchgen.grading.mathematics.relation_forms import named_value


def literal(text: str) -> Fraction | None:
    """The number that an answer says in digits; None if it says no number, or asks for arithmetic.

    A sign, a unit, a percent sign, a name before `=` and words for powers of ten may stand with it:
    `-5`, `18 cm`, `x = 5`, `5 million`. `9 + 9` and `18!` are none.
    """
    try:
        return _literal(read(tidy(text)))
    except (NotRead, RecursionError):
        return None


def _literal(node: Node) -> Fraction | None:
    match node:
        case Number(value):
            return value
        case Call("negate", (inner,)):
            number = _literal(inner)
            return None if number is None else -number
        case Call("scale", (inner, Number(scale))):
            number = _literal(inner)
            return None if number is None else number * scale
        case Call("percent" | "degree" | "°C" | "°F", (inner,)) | Quantity(inner):
            return _literal(inner)
        case Relation():
            value_node = named_value(node)
            return None if value_node is None else _literal(value_node)
        case Choice():
            return _literal(node.text)
    return None
