r"""Parses numbers as they are written: decimals, mixed numbers, repeating decimals, other bases.

`1\frac12`  →  3/2        `0.1\overline{6}`  →  1/6        `101_2`  →  Based("101", 2)
"""

from __future__ import annotations

from collections.abc import Callable
from fractions import Fraction

from batchgen.evals.math.reading.cursor import Cursor
from batchgen.evals.math.reading.nodes import Based, Node, NotRead, Number
from batchgen.evals.math.reading.number_words import NUMBERS
from batchgen.evals.math.reading.tokens import Token

# Commands over digits that repeat.
_REPEATING = ("overline", "bar")


def read_number(cursor: Cursor, token: Token, argument: Callable[[], Node]) -> Node:
    """The number that begins with a token. `argument` reads the argument of a command."""
    if cursor.is_sign("_"):
        return _based(cursor, token)
    if cursor.is_sign(".") and cursor.peek(1).text in _REPEATING:  # `3.\overline{3}`
        cursor.take()
        return _repeating(cursor, token.text + ".")
    if "." in token.text:
        if cursor.is_sign(*_REPEATING):
            return _repeating(cursor, token.text)
    elif (fraction := _fraction_after(cursor, argument)) is not None:
        return Number(Fraction(token.text) + fraction)
    return Number(Fraction(token.text))


def digit(cursor: Cursor) -> Node:
    """Read the first digit of the next number, as a command does for its argument; after `^`, read
    the whole number."""
    token = cursor.next
    if (cursor.at and cursor.peek(-1).text == "^") or len(token.text) == 1 or "." in token.text:
        return Number(Fraction(cursor.take().text))
    cursor.tokens[cursor.at] = Token("number", token.text[1:])
    return Number(Fraction(token.text[0]))


def _repeating(cursor: Cursor, text: str) -> Node:
    r"""Read a decimal whose last digits repeat: `0.1\overline{6}`."""
    cursor.expect(*_REPEATING)
    digits = cursor.braced_text()
    if not digits.isdecimal():
        raise NotRead
    below = 10 ** len(text.partition(".")[2])
    repeated = Fraction(int(digits), (10 ** len(digits) - 1) * below)
    return Number(Fraction(text.rstrip(".")) + repeated)


def _fraction_after(cursor: Cursor, argument: Callable[[], Node]) -> Fraction | None:
    r"""Read the fraction that makes a whole number a mixed one (`1\frac12`, `3 1/2`); None if none
    follows."""
    start, tokens = cursor.at, list(cursor.tokens)
    parts: list[Node] = []
    if cursor.accept("frac"):
        try:
            parts = [argument(), argument()]
        except NotRead:
            pass
    else:
        texts = [cursor.peek(ahead).text for ahead in range(3)]
        if texts[1] == "/" and texts[0].isdecimal() and texts[2].isdecimal():
            cursor.at += 3
            parts = [Number(Fraction(texts[0])), Number(Fraction(texts[2]))]
    match parts:
        case [Number(above), Number(below)] if 0 < above < below:
            return above / below
    cursor.at, cursor.tokens = start, tokens
    return None


def _based(cursor: Cursor, token: Token) -> Node:
    """Read the base after the digits of a number: `_2`, `_{two}`."""
    cursor.expect("_")
    base = cursor.braced_text()
    base = str(NUMBERS.get(base, base))
    if not base.isdecimal() or not 2 <= int(base) <= 36:
        raise NotRead
    return Based(token.text, int(base))
