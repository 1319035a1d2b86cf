"""The normal forms of values, points, sets, lists and words."""

from __future__ import annotations

from fractions import Fraction

from batchgen.grading.mathematics import numbers, real_sets
from batchgen.grading.mathematics.evaluate import value_form
from batchgen.grading.mathematics.forms import NAME, UNIT, Forms, text_form
from batchgen.grading.mathematics.numbers import Undefined
from batchgen.grading.mathematics.reading.nodes import (
    Based,
    Builder,
    Call,
    Choice,
    Group,
    Listing,
    Matrix,
    Node,
    NotRead,
    Number,
    Quantity,
    Ratio,
    Relation,
    SetOperation,
    Symbol,
    Words,
    variables_of,
)
from batchgen.grading.mathematics.reading.units import LETTERS
from batchgen.grading.mathematics.relation_forms import named, relation_forms, set_forms


def forms_of(node: Node) -> Forms:
    """The normal forms of an answer.

    Raises:
        NotRead: it has none.
    """
    try:
        return _FORMS[type(node)](node)
    except (Undefined, ZeroDivisionError):
        raise NotRead from None


def _expression(node: Call) -> Forms:
    if node.name == "percent":
        inner = forms_of(node.arguments[0])
        return Forms.of(f"{inner.main} %").holding(inner, UNIT).without(UNIT, value_form(node))
    if node.name in ("degree", "°C", "°F"):
        inner = forms_of(node.arguments[0])
        forms = Forms.of(f"{inner.main} [{node.name}]").holding(inner, UNIT)
        return forms.without(UNIT, value_form(node)) if node.name == "degree" else forms
    if node == Call("negate", (Symbol("oo"),)):
        return Forms.of("-oo")
    return Forms.of(value_form(node)).without(UNIT, *_letter_unit(node))


def _letter_unit(node: Call) -> tuple[str, ...]:
    """The value of a number before letters that may be a unit (`6m`, `18 m/s`), and with it."""
    powers: dict[str, int] = {}
    first = _collect(node, powers, 1)
    if first is None or not powers:
        return ()
    text = value_form(first)
    unit = " ".join(
        name if power == 1 else f"{name}^{power}" for name, power in sorted(powers.items())
    )
    return text, f"{text} [{unit}]"


def _collect(node: Node, powers: dict[str, int], sign: int) -> Node | None:
    """The number at the front of a product, whose letters are counted; None if it is no such."""
    if not variables_of(node):
        return None if powers else node
    if isinstance(node, Call) and node.name in ("*", "/"):
        first = _collect(node.arguments[0], powers, sign)
        if first is None:
            return None
        last = _collect(node.arguments[1], powers, sign if node.name == "*" else -sign)
        return first if last == Number(Fraction(1)) else None
    if isinstance(node, Symbol) and node.name in LETTERS:
        name = "L" if node.name == "l" else node.name
        powers[name] = powers.get(name, 0) + sign
        return Number(Fraction(1))
    if isinstance(node, Call) and node.name == "^" and isinstance(node.arguments[0], Symbol):
        exponent = node.arguments[1]
        if isinstance(exponent, Number) and exponent.value.denominator == 1:
            return _collect(node.arguments[0], powers, sign * int(exponent.value))
    return None


def _symbol(node: Symbol) -> Forms:
    if node.name == "oo":
        return Forms.of("oo")
    if len(node.name) == 1:
        text = value_form(node)
        return Forms.of(text, f"text {node.name}") if node.name != "i" else Forms.of(text)
    if node.name in ("pi",):
        return Forms.of(value_form(node))
    return Forms.of(value_form(node), text_form(node.name))


def _quantity(node: Quantity) -> Forms:
    inner = forms_of(node.value)
    if not node.unit:
        return inner
    return Forms.of(f"{inner.main} [{node.unit}]").holding(inner, UNIT)


def _ratio(node: Ratio) -> Forms:
    if len(node.items) == 2:
        return forms_of(Call("/", node.items))
    first = node.items[0]
    parts = [forms_of(Call("/", (item, first))).main for item in node.items[1:]]
    return Forms.of("ratio " + ":".join(parts))


def _group(node: Group) -> Forms:
    items = [forms_of(item) for item in node.items]
    if node.opening == "{set":
        return _set(items)
    inside = ";".join(item.main for item in items)
    full = [f"{node.opening}{inside}{node.closing}"]
    try:
        full.append(real_sets.set_text(real_sets.set_of(node)))
        if node.opening + node.closing != "()" or "oo" in full[1]:  # it is no point
            full.reverse()
    except NotRead:
        if node.opening + node.closing == "[]" and len(items) > 2:
            full.append(f"({inside})")
    return _shortened(Forms.of(*full), items, "(" + ";".join(i.shortest for i in items) + ")")


def _set(items: list[Forms]) -> Forms:
    """The forms of answers without an order."""
    mains = sorted({item.main for item in items})
    shorts = sorted({item.shortest for item in items})
    forms = Forms.of("{" + ";".join(mains) + "}")
    if len(mains) == 1:
        forms = forms.or_else(items[0])
    return _shortened(forms, items, "{" + ";".join(shorts) + "}")


def _shortened(forms: Forms, items: list[Forms], text: str) -> Forms:
    """The forms of items together, and their text without what each dropped for its shortest."""
    dropped = frozenset().union(*(item.dropped for item in items))
    return Forms(forms.main, forms.all | {(text, dropped)}) if dropped else forms


def _matrix(node: Matrix) -> Forms:
    rows = [[forms_of(item).main for item in row] for row in node.rows]
    full = ["matrix " + "|".join(";".join(row) for row in rows)]
    if len(rows) == 1 and len(rows[0]) == 1:
        full.append(rows[0][0])
    elif all(len(row) == 1 for row in rows):
        full.append("(" + ";".join(row[0] for row in rows) + ")")
    return Forms.of(*full)


def _real_set(node: SetOperation | Builder) -> Forms:
    try:
        return Forms.of(real_sets.set_text(real_sets.set_of(node)))
    except NotRead:
        if isinstance(node, Builder):
            return Forms.of(
                f"builder {forms_of(node.variable).main} : {forms_of(node.condition).main}"
            )
        parts = sorted(_operands(node, node.name)) if node.name in "|&" else None
        if parts is None:
            parts = [forms_of(node.left).main, forms_of(node.right).main]
        return Forms.of(f"sets {node.name} " + " ".join(parts))


def _operands(node: Node, name: str) -> list[str]:
    if isinstance(node, SetOperation) and node.name == name:
        return _operands(node.left, name) + _operands(node.right, name)
    return [forms_of(node).main]


def _listing(node: Listing) -> Forms:
    items = [forms_of(item) for item in named(node.items)]
    if node.joined == ";" and all(isinstance(item, Listing) for item in node.items):
        # `p=5, q=2; p=7, q=2` says two points
        points = {f"({';'.join(_shorts(item))})" for item in node.items}
        return _set(items).without(NAME, "{" + ";".join(sorted(points)) + "}")
    return _set(items).or_else(set_forms(node))


def _shorts(node: Node) -> list[str]:
    assert isinstance(node, Listing)
    return [forms_of(item).shortest for item in node.items]


def _based(node: Based) -> Forms:
    digits = "".join(node.digits.split(".")).lstrip("0") or "0"
    if node.base == 10:
        return Forms.of(f"{digits} base 10").without(UNIT, digits)
    return Forms.of(f"{digits} base {node.base}")


def _choice(node: Choice) -> Forms:
    return forms_of(Symbol(node.letter)).holding(forms_of(node.text), NAME)


def _words(node: Words) -> Forms:
    form = text_form(node.text)
    if form in _NONE:
        return Forms.of(form, "{}")
    if form in _ALL:
        return Forms.of(form, "(-oo,oo)")
    if form == "text ":
        raise NotRead
    return Forms.of(form)


_NONE = {
    f"text {what}" for what in ("no solution", "no solutions", "no real solutions", "empty set")
}
_ALL = {f"text {what}" for what in ("all real numbers", "all reals", "reals", "real numbers")}

_FORMS = {
    Number: lambda node: Forms.of(numbers.value_text(node.value)),
    Symbol: _symbol,
    Call: _expression,
    Based: _based,
    Quantity: _quantity,
    Words: _words,
    Ratio: _ratio,
    Group: _group,
    Matrix: _matrix,
    SetOperation: _real_set,
    Builder: _real_set,
    Relation: lambda node: relation_forms(node, forms_of),
    Listing: _listing,
    Choice: _choice,
}
