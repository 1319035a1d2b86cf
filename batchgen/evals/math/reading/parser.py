"""Parses the text of an answer into nodes. `read` is the entry point of this package.

`x = 5`  →  Relation(sides=(Symbol("x"), Number(5)), names=("=",))
"""

from __future__ import annotations

from batchgen.evals.math.reading.answers import Answers
from batchgen.evals.math.reading.cursor import Cursor
from batchgen.evals.math.reading.nodes import LetterChoice, Node, NotRead, Symbol, Words
from batchgen.evals.math.reading.tokens import Token, tokens_of


def read(text: str, thousands: bool = True) -> Node:
    """Parse a tidy text. `thousands` says whether `1,000` is one number.

    Raises:
        NotRead: the text is not an answer that is understood.
    """
    tokens = tokens_of(text, thousands)
    if not tokens:
        raise NotRead
    if (choice := _choice(tokens)) is not None:
        return choice
    return _read(tokens)


def _read(tokens: list[Token]) -> Node:
    return Answers(Cursor(tokens)).whole()


def _choice(tokens: list[Token]) -> Node | None:
    """The letter of a choice, possibly followed by its text; None if the answer does not begin with
    one. It is written `B) text`, `B. text`, `B: text`, or `(B) text`."""
    texts = [token.text for token in tokens[:3]]
    if tokens[0].kind == "letter" and tokens[0].text.isupper() and len(tokens) > 1:
        is_label = texts[1] == ")" or (
            texts[1] in (".", ":") and len(tokens) > 2 and tokens[2].spaced
        )
        # `A: B` may be a ratio of two variables.
        if is_label and tokens[2:3] != [] and tokens[2].kind == "letter" and not tokens[2].quoted:
            return None
        if is_label:
            return _choice_of(texts[0], tokens[2:])
        return None
    if len(texts) < 3 or (texts[0], texts[2]) != ("(", ")") or tokens[1].kind != "letter":
        return None
    if not texts[1].isupper():
        return None
    # What follows must be a text, and not a factor or the next item of a list.
    if len(tokens) > 3 and not (tokens[0].quoted or tokens[3].spaced):
        return None
    if len(tokens) > 3 and (tokens[3].text in (",", ";") or tokens[3].joins):
        return None
    return _choice_of(texts[1], tokens[3:])


def _choice_of(letter: str, rest: list[Token]) -> Node:
    """The letter of a choice with its text, which is words if it is not mathematics."""
    if not rest:
        return Symbol(letter)
    try:
        return LetterChoice(letter, _read(rest))
    except NotRead:
        return LetterChoice(letter, Words(" ".join(token.text for token in rest)))
