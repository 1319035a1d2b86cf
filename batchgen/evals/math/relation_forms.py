"""Makes the normal forms of equations and inequalities, for `normal_forms.py`.

    `x = 5`    `x = 5`, `0 = 18587/15232 | …`, and `5` without the name
    `2x > 4`   `> 0: -1 | …`, `x in (2,oo)`, and `(2,oo)` without the name

The forms with `|` are values of the difference of both sides at fixed points (`evaluate.py`),
divided by the first of them. So they are the same for all multiples of an equation.
"""

from __future__ import annotations

from collections.abc import Callable
from itertools import pairwise

from batchgen.evals.math import numbers, real_sets
from batchgen.evals.math.evaluate import values_of
from batchgen.evals.math.forms import NAME, Forms
from batchgen.evals.math.numbers import Undefined
from batchgen.evals.math.reading.nodes import (
    AnswerList,
    Bracketed,
    Call,
    Matrix,
    Node,
    NotRead,
    Number,
    Quantity,
    Ratio,
    Relation,
    Symbol,
    Words,
    variables_of,
)

FormsOf = Callable[[Node], Forms]


def relation_forms(node: Relation, forms_of: FormsOf) -> Forms:
    """The normal forms of a relation, from the forms of its sides.

    Raises:
        NotRead: it has none.
    """
    forms = _equation if set(node.names) <= {"=", "~"} else _inequality
    return forms(node, forms_of)


def _equation(node: Relation, forms_of: FormsOf) -> Forms:
    """The forms of `name = value`, of an equation, or of a chain of equal sides."""
    sides = node.sides
    first, value = _ends(node)
    value_forms = forms_of(value)
    if value is sides[0] and "=" not in node.names:
        return value_forms
    chain = Forms.of(_chain(node, forms_of))
    scaled = _scaled(first, value) if len(sides) == 2 else ()
    if _is_name(first):
        full = [f"{_name(first, forms_of)} = {value_forms.main}", *scaled]
        if isinstance(first, Bracketed) and isinstance(value, Bracketed):  # `(x, y) = (5, 7)`
            pairs = zip(first.items, value.items, strict=False)
            equations = tuple(Relation(pair, ("=",)) for pair in pairs)
            full.append(forms_of(AnswerList(equations, ",")).main)
        forms = Forms.of(*full)
        others = [side for side in sides if side is not first]
        if isinstance(first, Symbol) and any(first.name in variables_of(side) for side in others):
            return forms  # it is an equation in the name, and not its value
        return forms.holding(value_forms, NAME)
    if _is_constant(first) and _is_constant(value):
        return value_forms.or_else(chain)
    if len(sides) > 2 and all(map(_is_constant, sides[1:])):  # `m + n = 100 + 13 = 113`
        return chain.holding(value_forms, NAME)
    return Forms.of(*scaled) if scaled else chain


def _ends(node: Relation) -> tuple[Node, Node]:
    """The side that a chain of equal sides names, and its value: the last side after `=`."""
    sides = node.sides
    if "=" not in node.names:  # `x \approx 11` names a value, `\sqrt 3 \approx 1.7` has one
        return sides[0], sides[-1 if _is_name(sides[0]) else 0]
    value = sides[max(at for at, name in enumerate(node.names, 1) if name == "=")]
    if len(sides) == 2 and _is_name(value) and not _is_name(sides[0]):
        return value, sides[0]
    return sides[0], value


def named_value(node: Relation) -> Node | None:
    """The value that a relation gives to a name (`x = 5`), or that a chain ends with; None if it is
    an equation or an inequality."""
    if not set(node.names) <= {"=", "~"}:
        return None
    first, value = _ends(node)
    return value if _is_name(first) or _is_constant(first) or len(node.sides) > 2 else None


def _chain(node: Relation, forms_of: FormsOf) -> str:
    """The text of all sides."""
    mains = [forms_of(side).main for side in node.sides]
    return mains[0] + "".join(f" {n} {m}" for n, m in zip(node.names, mains[1:], strict=True))


def _is_constant(node: Node) -> bool:
    return isinstance(node, Number | Call | Symbol | Quantity) and not variables_of(node)


def _is_name(node: Node) -> bool:
    """Whether a side only names the other side: `x`, `AB`, `f(x)`, `(p,q)`, `A:B`."""
    if isinstance(node, Symbol):
        return node.name not in ("oo", "pi", "i")
    if isinstance(node, Call):
        if node.name == "/":  # `dy/dx`, `AB/CD`
            parts = node.arguments
            return all(map(_is_differential, parts)) or all(map(_is_segment, parts))
        if node.name in ("sin", "cos", "tan"):
            return isinstance(node.arguments[0], Symbol)
        if node.name == "abs":
            return _is_name(node.arguments[0])
        if node.name != "*" or len(node.arguments) != 2:
            return False
        left, right = node.arguments
        if isinstance(right, Symbol) and right.name.isupper():
            return _is_segment(left)
        return isinstance(left, Symbol) and left.name == "P" and _is_name(right)
    if isinstance(node, Ratio):
        return all(_is_name(item) for item in node.items)
    if isinstance(node, Matrix):
        return all(_is_name(item) for row in node.rows for item in row)
    return isinstance(node, Words) or (
        isinstance(node, Bracketed) and all(map(_is_name, node.items))
    )


def _is_differential(node: Node) -> bool:
    if not isinstance(node, Call) or node.name != "*":
        return False
    first, last = node.arguments
    return first == Symbol("d") and isinstance(last, Symbol)


def _is_segment(node: Node) -> bool:
    if isinstance(node, Call) and node.name == "*":
        return _is_segment(node.arguments[0]) and _is_segment(node.arguments[1])
    return isinstance(node, Symbol) and node.name.isupper()


def _name(node: Node, forms_of: FormsOf) -> str:
    return node.name if isinstance(node, Symbol) else forms_of(node).main


def _scaled(left: Node, right: Node) -> tuple[str, ...]:
    """The form of an equation, which is the same for all its multiples; empty if it has none, as if
    a value is 0."""
    try:
        values = values_of(Call("+", (left, Call("negate", (right,)))))
        if all(value != 0 for value in values):
            ratios = [numbers.divide(value, values[0]) for value in values[1:]]
            return (
                "0 = " + " | ".join(numbers.value_text(ratio, exact=False) for ratio in ratios),
            )
    except (NotRead, Undefined):
        pass
    return ()


def _inequality(node: Relation, forms_of: FormsOf) -> Forms:
    """The forms of inequalities, and of the set of numbers that fulfil them."""
    try:
        steps = zip(pairwise(node.sides), node.names, strict=True)
        forms = Forms.of(
            " & ".join(sorted(_step(left, name, right) for (left, right), name in steps))
        )
    except (NotRead, Undefined):
        forms = Forms.of(_chain(node, forms_of))
    forms = forms.or_else(set_forms(node))
    if node.names == ("in",):
        name, members = node.sides
        if not (isinstance(members, Symbol) and members.name.startswith("set ")):
            forms = forms.holding(forms_of(members), NAME)
        if isinstance(members, Bracketed) and members.opening == "{set" and members.items:
            equations = tuple(Relation((name, item), ("=",)) for item in members.items)
            forms = forms.or_else(forms_of(AnswerList(equations, ",")))
    elif len(node.sides) == 3 and set(node.names) <= {"<", "<="}:  # `0 < f(x) < 1`
        low, _, high = node.sides
        opening, closing = ("[" if name == "<=" else "(" for name in node.names)
        bounds = Bracketed(opening, (low, high), {"[": "]", "(": ")"}[closing])
        forms = forms.holding(forms_of(bounds), NAME)
    return forms


def _step(left: Node, name: str, right: Node) -> str:
    """The form of one inequality, which is the same for all its positive multiples. Sides are
    swapped so that only `>`, `>=` and `!=` remain."""
    if name not in ("<", "<=", ">", ">=", "!="):
        raise NotRead
    if name in ("<", "<="):
        left, right = right, left
    values = values_of(Call("+", (left, Call("negate", (right,)))))
    if name == "!=":
        scale = values[0]
    else:
        scale = abs(numbers.real(values[0]))
    if scale == 0:
        raise NotRead
    sign = {"<": ">", "<=": ">="}.get(name, name)
    return f"{sign} 0: " + " | ".join(
        numbers.value_text(numbers.divide(value, scale), exact=False) for value in values
    )


def named(items: tuple[Node, ...]) -> tuple[Node, ...]:
    """The items of a list such as `x = 2, 3`, where the first item's name applies to all."""
    first = items[0]
    if not isinstance(first, Relation) or first.names != ("=",) or not _is_name(first.sides[0]):
        return items
    if any(isinstance(item, Relation | Words) for item in items[1:]):
        return items
    return first, *(Relation((first.sides[0], item), ("=",)) for item in items[1:])


def set_forms(node: Relation | AnswerList) -> Forms:
    """The forms of the set of real numbers that relations describe; none if they describe no such
    set."""
    try:
        text = real_sets.set_text(real_sets.set_of_relations(node))
    except (NotRead, Undefined):
        return Forms("", frozenset())
    sides = [item.sides for item in _relations(node)]
    names = {name for group in sides for side in group for name in variables_of(side)}
    return Forms.of(f"{'/'.join(sorted(names))} in {text}").without(NAME, text)


def _relations(node: Relation | AnswerList) -> list[Relation]:
    items = (node,) if isinstance(node, Relation) else node.items
    return [item for item in items if isinstance(item, Relation)]
