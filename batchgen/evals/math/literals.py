"""Reads the number that an answer states in digits, without computing anything: `18 cm` is 18, and
`9 + 9` is none. Method `integer` of `Grade` uses it."""

from __future__ import annotations

from fractions import Fraction

from batchgen.evals.math.reading.layout import tidy
from batchgen.evals.math.reading.nodes import (
    Call,
    LetterChoice,
    Node,
    NotRead,
    Number,
    Quantity,
    Relation,
    Symbol,
)
from batchgen.evals.math.reading.parser import read
from batchgen.evals.math.relation_forms import named_value


def literal_number(text: str) -> Fraction | None:
    """The number that an answer states in digits; None if it states no number, or one that must be
    computed.

    A sign, a unit, a percent sign, a name or a sum of names before `=` and words for powers of ten
    are allowed: `-5`, `18 cm`, `x = 5`, `m + n = 5`, `5 million`. `9 + 9` and `18!` must be
    computed.
    """
    try:
        return _literal(read(tidy(text)))
    except (NotRead, RecursionError):
        return None


def _literal(node: Node) -> Fraction | None:
    """The number of a node; None as for `literal_number`."""
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
        case Relation((first, value), ("=",)) if _is_sum_of_names(first):
            return _literal(value)
        case Relation():
            value_node = named_value(node)
            return None if value_node is None else _literal(value_node)
        case LetterChoice():
            return _literal(node.text)
    return None


def _is_sum_of_names(node: Node) -> bool:
    """Whether a side is a sum, difference or product of bare names, as `m + n` in `m + n = 293`."""
    if not isinstance(node, Call) or node.name not in ("+", "*", "negate"):
        return False
    return all(
        isinstance(argument, Symbol) or _is_sum_of_names(argument) for argument in node.arguments
    )
