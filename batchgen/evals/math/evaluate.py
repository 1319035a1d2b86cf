"""Evaluates expressions at fixed points; expressions with variables are compared by these values.

Two expressions that agree at a few unrelated points are equal, except with a negligible
probability. So no computer algebra is needed, and every comparison ends. `normal_forms.py` calls
`value_form`.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable
from fractions import Fraction
from functools import lru_cache, partial

from batchgen.evals.math import numbers
from batchgen.evals.math.numbers import CONTEXT, Undefined, Value
from batchgen.evals.math.reading.nodes import (
    Call,
    Node,
    NotRead,
    Number,
    Symbol,
    variables_of,
)

POINTS = 4
"""The number of points at which expressions are compared. Variables are negative in the last two,
where `sqrt(x^2)` is not `x`."""

# `i` is mpmath's imaginary unit j.
CONSTANTS = {"pi": CONTEXT.pi, "e": CONTEXT.e, "i": CONTEXT.j}


@lru_cache(maxsize=4096)
def coordinate(point: int, name: str) -> Fraction:
    """The value of a variable at a point: a fraction computed from its name."""
    digest = hashlib.sha256(f"{point} {name}".encode("utf-8", "surrogatepass")).digest()
    size = Fraction(int.from_bytes(digest[:4], "big") % 9973 + 1009, 4001)
    return -size if point >= POINTS // 2 else size


def values_of(node: Node) -> tuple[Value, ...]:
    """The values of an expression at all points.

    Raises:
        NotRead: the node is not an expression.
        Undefined: it has no value at one of the points.
    """
    return tuple(evaluate_at(node, partial(coordinate, point)) for point in range(POINTS))


def evaluate_at(node: Node, variable: Callable[[str], Value]) -> Value:
    """The value of an expression. `variable` returns the value of a variable by its name.

    Raises:
        NotRead: the node is not an expression.
        Undefined: it has no value there.
    """
    if isinstance(node, Number):
        return node.value
    if isinstance(node, Symbol):
        if node.name == "oo":
            raise Undefined
        constant = CONSTANTS.get(node.name)
        return variable(node.name) if constant is None else +constant  # `+` rounds
    if not isinstance(node, Call):
        raise NotRead
    values = [evaluate_at(argument, variable) for argument in node.arguments]
    first = values[0]
    match node.name:
        case "+":
            for value in values[1:]:
                first = numbers.add(first, value)
        case "*" | "scale":
            for value in values[1:]:
                first = numbers.multiply(first, value)
        case "/":
            first = numbers.divide(*values)
        case "^":
            first = numbers.power(*values)
        case "negate":
            first = numbers.multiply(Fraction(-1), first)
        case "degree":
            first = numbers.multiply(numbers.multiply(first, +CONTEXT.pi), Fraction(1, 180))
        case "percent":
            first = numbers.divide(first, Fraction(100))
        case "factorial":
            first = numbers.factorial(first)
        case "binomial":
            first = numbers.binomial(*values)
        case _:
            return numbers.call(node.name, tuple(values))
    return first


def constant(node: Node) -> Value:
    """The value of an expression without variables.

    Raises:
        NotRead: it has variables, or is not an expression.
        Undefined: it has no value.
    """
    if variables_of(node):
        raise NotRead
    return numbers.snapped(evaluate_at(node, lambda _: Fraction(0)))


def value_form(node: Node) -> str:
    """The text of an expression's value; for one with variables, of its values at several
    points."""
    if not variables_of(node):
        return numbers.value_text(constant(node))
    texts = [numbers.value_text(value, exact=False) for value in values_of(node)]
    return texts[0] if len(set(texts)) == 1 else " | ".join(texts)
