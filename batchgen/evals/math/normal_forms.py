"""Makes the normal forms of parsed answers: values, points, sets, lists and words. `same_math`
compares answers by them.

    `(1, 2)`           a point `(1;2)`, or an interval `(1,2)`
    `{2, 1}`           `{1;2}`
    `x = 1 or x = 2`   `{x = 1;x = 2}`, `x in {1;2}`, and `{1;2}` without the name
    `1:2:3`            `ratio 2:3`, relative to the first part
    `2x + 1`           its values at four points: `13547/4001 | 6837/4001 | …`
"""

from __future__ import annotations

from fractions import Fraction

from batchgen.evals.math import numbers, real_sets
from batchgen.evals.math.evaluate import value_form
from batchgen.evals.math.forms import NAME, UNIT, Forms, text_form
from batchgen.evals.math.numbers import Undefined
from batchgen.evals.math.reading.nodes import (
    AnswerList,
    Based,
    Bracketed,
    Builder,
    Call,
    LetterChoice,
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
)
from batchgen.evals.math.reading.number_words import number_in_words
from batchgen.evals.math.reading.units import LETTERS, reduced
from batchgen.evals.math.relation_forms import (
    named,
    named_value,
    relation_forms,
    set_forms,
)


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
    """The forms of an expression: its value; for `5%` and `90°` also without the sign."""
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


def _letter_unit(node: Node) -> tuple[str, ...]:
    """For a number times letters that may be a unit (`6m`, `18 m/s`), two texts: the value without
    the unit, and the value in base units with the unit. Empty for other expressions."""
    divided: dict[str, int] | None = {}
    if isinstance(node, Call) and node.name == "/":
        node, divisor = node.arguments
        divided = _powers(divisor, ("s", 2))
    match node:
        case Call("*", (number, letters)) if _is_written(number):
            multiplied = _powers(letters, ("m", 2), ("m", 3))
        case _:
            return ()
    if not multiplied or divided is None:
        return ()
    factors = [*multiplied.items(), *((letter, -power) for letter, power in divided.items())]
    unit, size = reduced(factors)
    measured = number if size == 1 else Call("*", (Number(size), number))
    return value_form(number), f"{value_form(measured)} [{unit}]"


def _powers(node: Node, *raised: tuple[str, Fraction | int]) -> dict[str, int] | None:
    """The letter of a unit → its power: 1, or one of `raised`, which are pairs of a letter and a
    power. None if the node is not a unit."""
    match node:
        case Symbol(name) if name in LETTERS:
            power = 1
        case Call("^", (Symbol(name), Number(exponent))) if (name, exponent) in raised:
            power = int(exponent)
        case _:
            return None
    return {{"l": "L", "Omega": "Ω"}.get(name, name): power}


def _is_written(node: Node) -> bool:
    """Whether an expression is a number in digits, or a fraction of such numbers."""
    if isinstance(node, Call) and node.name in ("/", "negate"):
        return all(map(_is_written, node.arguments))
    return isinstance(node, Number)


def _symbol(node: Symbol) -> Forms:
    """The forms of a symbol, which may be a variable, a constant or a word."""
    if node.name == "oo":
        return Forms.of("oo")
    forms = Forms.of(value_form(node))
    if node.name in ("i", "pi"):
        return forms
    if len(node.name) == 1:  # the case of a single letter counts, unlike that of words
        return forms.or_else(Forms.of(f"text {node.name}"))
    return forms.or_else(Forms.of(text_form(node.name))) if node.name.isalnum() else forms


def _quantity(node: Quantity) -> Forms:
    """The forms of a value with a unit: in base units (`5 cm` is `1/20 [m]`), and without it."""
    inner = forms_of(node.value)
    if not node.unit:
        return inner
    measured = inner if node.size == 1 else forms_of(node.measured)
    return Forms.of(f"{measured.main} [{node.unit}]").holding(inner, UNIT)


def _ratio(node: Ratio) -> Forms:
    """The form of a ratio: `2:4:6` is `ratio 2:3`, relative to the first part; `1:2` is 1/2."""
    if len(node.items) == 2:
        return forms_of(Call("/", node.items))
    first = node.items[0]
    parts = [forms_of(Call("/", (item, first))).main for item in node.items[1:]]
    return Forms.of("ratio " + ":".join(parts))


def _group(node: Bracketed) -> Forms:
    """The forms of items in brackets: a point, an interval, a set or a matrix."""
    items = [forms_of(item) for item in node.items]
    if node.opening == "{set":
        return _set(items)
    inside = ";".join(item.main for item in items)
    rows = [
        item.items for item in node.items if isinstance(item, Bracketed) and item.opening == "["
    ]
    if node.opening == "[" and len(rows) == len(items):  # a matrix as programs write it
        return forms_of(Matrix(tuple(rows)))
    texts = [f"{node.opening}{inside}{node.closing}"]
    try:
        # An interval comes before the point that it may also be.
        texts.insert(0, real_sets.set_text(real_sets.set_of(node)))
    except NotRead:
        if node.opening + node.closing == "[]" and len(items) > 2:
            texts.append(f"({inside})")
    return _shortened(Forms.of(*texts), items, "(" + ";".join(i.shortest for i in items) + ")")


def _set(items: list[Forms]) -> Forms:
    """The forms of a set of answers, whose order does not matter."""
    mains = sorted({item.main for item in items})
    shorts = sorted({item.shortest for item in items})
    forms = Forms.of("{" + ";".join(mains) + "}")
    if len(mains) == 1:
        forms = forms.or_else(items[0])
    return _shortened(forms, items, "{" + ";".join(shorts) + "}")


def _shortened(forms: Forms, items: list[Forms], text: str) -> Forms:
    """These forms, and `text`, which is made of the shortest forms of the items, unless these leave
    out nothing."""
    dropped = frozenset().union(*(item.dropped for item in items))
    return Forms(forms.main, forms.all | {(text, dropped)}) if dropped else forms


def _matrix(node: Matrix) -> Forms:
    """The forms of a matrix; a column is also a point, and a single entry that entry."""
    rows = [[forms_of(item).main for item in row] for row in node.rows]
    texts = ["matrix " + "|".join(";".join(row) for row in rows)]
    if len(rows) == 1 and len(rows[0]) == 1:
        texts.append(rows[0][0])
    elif all(len(row) == 1 for row in rows):
        texts.append(forms_of(Bracketed("(", tuple(row[0] for row in node.rows), ")")).main)
    return Forms.of(*texts)


def _real_set(node: SetOperation | Builder) -> Forms:
    """The forms of a set: its intervals, or the forms of its parts if it has none."""
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
    """The main forms of the operands of one set operation, without the brackets between them."""
    if isinstance(node, SetOperation) and node.name == name:
        return _operands(node.left, name) + _operands(node.right, name)
    return [forms_of(node).main]


def _listing(node: AnswerList) -> Forms:
    """The forms of several answers: points, a set of real numbers, or any set."""
    items = [forms_of(item) for item in named(node.items)]
    if node.joined == ";" and all(isinstance(item, AnswerList) for item in node.items):
        # `p=5, q=2; p=7, q=2` means two points
        values = [_point(item) for item in node.items if isinstance(item, AnswerList)]
        points = forms_of(AnswerList(tuple(values), ","))
        return _set(items).without(NAME, points.main)
    as_reals = set_forms(node)
    if as_reals.all and any(isinstance(i, Relation) and i.names != ("=",) for i in node.items):
        return as_reals  # `x > 2 and x < 5` is not `x > 2 or x < 5`
    return _set(items).or_else(as_reals)


def _point(node: AnswerList) -> Node:
    """The point whose coordinates are the right sides of equations, in their order."""
    values = (named_value(item) if isinstance(item, Relation) else item for item in node.items)
    return Bracketed("(", tuple(value for value in values if value is not None), ")")


def _based(node: Based) -> Forms:
    """The forms of a number whose digits have a base."""
    digits = "".join(node.digits.split(".")).lstrip("0") or "0"
    if node.base == 10:
        return Forms.of(f"{digits} base 10").without(UNIT, digits)
    return Forms.of(f"{digits} base {node.base}")


def _choice(node: LetterChoice) -> Forms:
    letter, text = forms_of(Symbol(node.letter)), forms_of(node.text)
    return Forms.of(f"{node.letter}: {text.main}").holding(letter, "text").holding(text, "letter")


def _words(node: Words) -> Forms:
    """The forms of words, which may state a number, no value, or a set."""
    form = text_form(node.text)
    if (number := number_in_words(form.removeprefix("text "))) is not None:
        return Forms.of(form, str(number))
    if form in _NONE:
        return Forms.of(form, "{}")
    if form in _MISSING:
        return Forms.of(form, "text does not exist")
    if form in _ALL:
        return Forms.of(form, "(-oo,oo)")
    if form == "text ":
        raise NotRead
    return Forms.of(form)


# The forms of words that stand for no value, for the empty set, and for all real numbers.
_MISSING = {f"text {what}" for what in ("does not exist", "dne", "undefined")}
_NONE = {
    f"text {what}"
    for what in ("no solution", "no solutions", "no real solutions", "empty set", "none")
}
_ALL = {f"text {what}" for what in ("all real numbers", "all reals", "reals", "real numbers")}

# The function that makes the forms of each kind of node.
_FORMS = {
    Number: lambda node: Forms.of(numbers.value_text(node.value)),
    Symbol: _symbol,
    Call: _expression,
    Based: _based,
    Quantity: _quantity,
    Words: _words,
    Ratio: _ratio,
    Bracketed: _group,
    Matrix: _matrix,
    SetOperation: _real_set,
    Builder: _real_set,
    Relation: lambda node: relation_forms(node, forms_of),
    AnswerList: _listing,
    LetterChoice: _choice,
}
