"""Parses the words after a number: its unit of measure, or the things that it counts.

`18 km per hour`  →  `m s^-1`, size 5/18        `18 eggs`  →  `of egg`, size 1
"""

from __future__ import annotations

from fractions import Fraction

from batchgen.evals.math.reading.cursor import Cursor
from batchgen.evals.math.reading.units import Unit, unit_of

_LONGEST_UNIT = 24
"""The most tokens of a unit."""
# Words that do not name things that can be counted.
_NO_THINGS = {
    "or", "so", "more", "less", "than", "times", "half", "least", "most", "not", "mod", "base",
    "of", "to", "is", "are", "between", "if", "when", "where", "about", "except", "point", "pm",
    "am", "log", "sqrt", "pi", "infinity", "squared", "cubed", "over", "plus", "minus",
    "halves", "third", "thirds", "fourth", "fourths", "quarter", "quarters", "fifth", "fifths",
    "tenth", "tenths", "hundredth", "hundredths", "thousandth", "thousandths", "hundreds",
    "thousands", "millions", "billions", "lakh", "crore", "gross", "score", "scores", "permil",
    "factorial", "negative", "doubled", "tripled", "below", "above", "rejected", "wrong",
}  # fmt: skip


def unit_behind(cursor: Cursor, counted: bool) -> Unit | None:
    """Read the unit after a value, the longest that is known, and move the cursor behind it. None
    if there is none. With `counted`, words that name things are read too (`18 eggs`), and become a
    unit of their own (`of egg`)."""
    if cursor.next.kind not in ("word", "letter") and not _begins_unit(cursor):
        return None
    if not counted and cursor.next.text == "in":  # `x in [1, 2]`
        return None
    end = min(_end_of_words(cursor), cursor.at + _LONGEST_UNIT)
    for last in range(end, cursor.at, -1):
        words = [token.text for token in cursor.tokens[cursor.at : last]]
        if (unit := unit_of(words)) is not None:
            cursor.at = last
            base_units, size = unit
            things = _things(cursor)
            return (f"{base_units} {things}".strip(), size) if things else unit
    things = _things(cursor) if counted else ""
    return (things, Fraction(1)) if things else None


def _begins_unit(cursor: Cursor) -> bool:
    return cursor.is_sign("/", "(") and cursor.peek(1).kind == "word"


def _end_of_words(cursor: Cursor) -> int:
    """Return the index after the last token that may belong to a unit."""
    end, depth, allowed = cursor.at, 0, {"^", "/", "{", "}", "*", "-", ".", "(", ")"}
    for end in range(cursor.at, len(cursor.tokens) + 1):
        if end == len(cursor.tokens):
            break
        token = cursor.tokens[end]
        if token.joins:
            break
        if token.kind == "sign":
            depth += {"{": 1, "(": 1, "}": -1, ")": -1}.get(token.text, 0)
            if token.text not in allowed or depth < 0:
                break
        if token.kind not in ("word", "letter", "number", "sign"):
            break
    return end


def _things(cursor: Cursor) -> str:
    """Read words that name the things that are counted (`18 eggs per day`); empty if none
    follow."""
    rest = cursor.tokens[cursor.at :]
    words = []
    for token in rest:
        if token.kind == "sign" and token.text in (",", ";", ")", "}", "]", "}set"):
            break
        if token.joins:
            break
        if token.kind not in ("word", "letter") and token.text not in ("/", "-", ".", "'", "%"):
            return ""
        if token.kind == "letter" and not token.quoted:
            return ""
        words.append(token)
    if not words or not any(token.kind == "word" for token in words):
        return ""
    if {token.text.lower() for token in words} & _NO_THINGS:
        return ""
    cursor.at += len(words)
    return "of " + " ".join(token.text.lower().removesuffix("s") for token in words)
