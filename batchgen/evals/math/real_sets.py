"""Sets of real numbers as sorted intervals, and the sets that relations in one variable describe.
`normal_forms.py` and `relation_forms.py` use them."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from fractions import Fraction
from typing import Any

from batchgen.evals.math import numbers
from batchgen.evals.math.evaluate import constant, evaluate_at
from batchgen.evals.math.numbers import Undefined, Value
from batchgen.evals.math.reading.nodes import (
    AnswerList,
    Bracketed,
    Builder,
    Call,
    Node,
    NotRead,
    Relation,
    SetOperation,
    Symbol,
    variables_of,
)

INFINITY = float("inf")
# The most intervals of a set; more are not read.
_MOST_PIECES = 100
_MIRRORED = {"<": ">", ">": "<", "<=": ">=", ">=": "<=", "=": "=", "!=": "!=", "~": "="}
"""Relation → the relation that holds if the sides are swapped; `~` (about) is read as `=`."""


@dataclass(frozen=True, slots=True)
class Edge:
    """A place between real numbers: just below a value, or just above it. The interval [3, 5) goes
    from the edge below 3 to the edge below 5.

    Attributes:
        value: a value of `numbers.py`, or an infinite float.
        above: whether the edge is above the value.
    """

    value: Any
    above: bool

    def __lt__(self, other: Edge) -> bool:
        if self.value == other.value:
            return not self.above and other.above
        return less(self.value, other.value)


def less(left: Any, right: Any) -> bool:
    """Whether a bound is below another."""
    if isinstance(left, float) or isinstance(right, float):  # an infinity
        return float(left) < float(right)
    return bool(numbers.as_float(left) < numbers.as_float(right))


Pieces = tuple[tuple[Edge, Edge], ...]
"""Intervals from one edge to another, in ascending order, which do not touch each other."""

_LEFT, _RIGHT = Edge(-INFINITY, above=False), Edge(INFINITY, above=True)
ALL: Pieces = ((_LEFT, _RIGHT),)


def interval(low: Any, high: Any, *, with_low: bool, with_high: bool) -> Pieces:
    """The numbers between two bounds, with or without each bound."""
    # An infinite bound is never a number of the set: (2, oo) ends at the same edge as x > 2.
    first = Edge(low, above=not (with_low or low == -INFINITY))
    last = Edge(high, above=with_high or high == INFINITY)
    return ((first, last),) if first < last else ()


def single(value: Any) -> Pieces:
    """The set of one number."""
    return interval(value, value, with_low=True, with_high=True)


def set_union(sets: Iterable[Pieces]) -> Pieces:
    """The numbers that are in any of the sets."""
    pieces = sorted((piece for pieces in sets for piece in pieces), key=lambda piece: piece[0])
    if len(pieces) > _MOST_PIECES:
        raise NotRead
    merged: list[tuple[Edge, Edge]] = []
    for first, last in pieces:
        if merged and not merged[-1][1] < first:
            if merged[-1][1] < last:
                merged[-1] = merged[-1][0], last
        else:
            merged.append((first, last))
    return tuple(merged)


def set_complement(pieces: Pieces) -> Pieces:
    """The real numbers that are not in a set."""
    edges = [_LEFT, *(edge for piece in pieces for edge in piece), _RIGHT]
    return tuple((a, b) for a, b in zip(edges[::2], edges[1::2], strict=True) if a < b)


def intersection(left: Pieces, right: Pieces) -> Pieces:
    """The numbers that are in both sets."""
    return set_complement(set_union((set_complement(left), set_complement(right))))


def set_text(pieces: Pieces) -> str:
    """The text of a set: `(-oo,2) U [3,3]`."""
    if not pieces:
        return "{}"
    if all(first.value == last.value for first, last in pieces):
        return "{" + ";".join(sorted(_edge_text(first.value) for first, _ in pieces)) + "}"
    return " U ".join(
        f"{'(' if first.above or first.value == -INFINITY else '['}{_edge_text(first.value)},"
        f"{_edge_text(last.value)}{']' if last.above and last.value != INFINITY else ')'}"
        for first, last in pieces
    )


def _edge_text(value: Any) -> str:
    if isinstance(value, float):
        return "oo" if value > 0 else "-oo"
    return numbers.value_text(value)


def interval_bound(node: Node) -> Any:
    """The value of an interval's bound, real or infinite.

    Raises:
        NotRead: the node is not such a value.
    """
    if node == Symbol("oo"):
        return INFINITY
    if node == Call("negate", (Symbol("oo"),)):
        return -INFINITY
    try:
        return numbers.real(constant(node))
    except Undefined:
        raise NotRead from None


def set_of(node: Node, only_sets: bool = True) -> Pieces:
    """The set of real numbers that an answer describes.

    Raises:
        NotRead: it describes none; or, with `only_sets`, it is a relation such as `x > 2`, which is
            not written as a set.
    """
    if isinstance(node, Bracketed):
        if node.opening == "{set":
            return set_union(map(single, map(interval_bound, node.items)))
        if len(node.items) == 2 and node.opening in "([" and node.closing in ")]":
            low, high = map(interval_bound, node.items)
            if not less(low, high):
                if low == high and node.opening + node.closing == "[]":
                    return single(low)
                raise NotRead
            return interval(low, high, with_low=node.opening == "[", with_high=node.closing == "]")
    elif isinstance(node, SetOperation):
        left, right = set_of(node.left), set_of(node.right)
        if node.name == "|":
            return set_union((left, right))
        return intersection(left, right if node.name == "&" else set_complement(right))
    elif isinstance(node, Builder):
        return set_of(node.condition, only_sets=False)
    elif not only_sets:
        return set_of_relations(node)
    raise NotRead


def set_of_relations(node: Node) -> Pieces:
    """The values of the only variable in relations for which they hold.

    Raises:
        NotRead: they cannot be solved.
    """
    if isinstance(node, Relation):
        return _set_of_chain(node)
    if isinstance(node, AnswerList):
        if len({name for item in node.items for name in _variable(item)}) > 1:
            raise NotRead
        sets = [set_of_relations(item) for item in node.items]
        excludes = node.joined == "," and all(_excludes(item) for item in node.items)
        if node.joined == "and" or excludes:
            result = ALL
            for pieces in sets:
                result = intersection(result, pieces)
            return result
        either = set_union(sets)
        if either == ALL and node.joined == ",":  # `x > 2, x < 5` means that both hold
            return intersection(sets[0], sets[1]) if len(sets) == 2 else either
        return either
    raise NotRead


def _excludes(node: Node) -> bool:
    """Whether an answer only excludes a number, such as `x != 2`."""
    return isinstance(node, Relation) and node.names == ("!=",)


def _variable(node: Node) -> set[str]:
    if not isinstance(node, Relation):
        raise NotRead
    return set().union(*(variables_of(side) for side in node.sides))


def _set_of_chain(node: Relation) -> Pieces:
    """The set that a chain of relations describes: `0 < x < 1` is that of both relations."""
    if node.names == ("in",) and isinstance(node.sides[0], Symbol):
        return set_of(node.sides[1])
    if len(_variable(node)) != 1:
        raise NotRead
    result = ALL
    for left, name, right in zip(node.sides, node.names, node.sides[1:], strict=False):
        if name not in _MIRRORED:
            raise NotRead
        result = intersection(result, _set_of_one(left, name, right))
    return result


def _set_of_one(left: Node, name: str, right: Node) -> Pieces:
    """The set that a relation of two sides describes. The sides must be linear in the variable; one
    side may be the absolute value of a linear expression."""
    if not variables_of(left):
        left, right, name = right, left, _MIRRORED[name]
    if isinstance(left, Call) and left.name == "abs" and not variables_of(right):
        # |x| < 3 is x < 3 and x > -3; |x| > 3 is x > 3 or x < -3. Below 0, this holds for all
        # relations but = and !=: |x| > -3 is x > -3 or x < 3, which all x are.
        (inner,) = left.arguments
        upper = _set_of_one(inner, name, right)
        lower = _set_of_one(inner, _MIRRORED[name], Call("negate", (right,)))
        if name in ("=", "~", "!=") and less(interval_bound(right), 0):
            return ALL if name == "!=" else ()
        do_both_hold = name in ("<", "<=", "!=")
        return intersection(upper, lower) if do_both_hold else set_union((upper, lower))
    if isinstance(left, Symbol) and not variables_of(right):
        return _numbers_related(interval_bound(right), name)
    slope, offset = _line(Call("+", (left, Call("negate", (right,)))))
    root = numbers.divide(numbers.multiply(Fraction(-1), offset), slope)
    return _numbers_related(root, name if slope > 0 else _MIRRORED[name])


def _line(node: Node) -> tuple[Value, Value]:
    """The slope and the value at 0 of an expression that is linear in its variable. Raises NotRead
    if its values at 2 and -5 are not on the line through those at 0 and 1."""
    try:
        at_0, at_1, *others = (
            numbers.real(evaluate_at(node, lambda _, x=x: Fraction(x)))  # type: ignore[misc]
            for x in (0, 1, 2, -5)
        )
        slope = numbers.add(at_1, -at_0)
        for x, value in zip((2, -5), others, strict=True):
            there = numbers.add(at_0, numbers.multiply(slope, Fraction(x)))
            if numbers.snapped(numbers.add(value, -there)) != 0:
                raise NotRead
    except Undefined:
        raise NotRead from None
    if slope == 0:
        raise NotRead
    return slope, at_0


def _numbers_related(value: Any, name: str) -> Pieces:
    """The numbers that are in the relation `name` to a value."""
    match name:
        case "<" | "<=":
            return interval(-INFINITY, value, with_low=True, with_high=name == "<=")
        case ">" | ">=":
            return interval(value, INFINITY, with_low=name == ">=", with_high=True)
        case "!=":
            return set_complement(single(value))
    return single(value)
