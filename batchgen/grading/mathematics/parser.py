"""The grammar of answers: lists, relations, sets, quantities, and expressions in them."""

from __future__ import annotations

from functools import partial

from batchgen.grading.mathematics.cursor import Cursor
from batchgen.grading.mathematics.evaluate import variables_of
from batchgen.grading.mathematics.expressions import Expressions
from batchgen.grading.mathematics.nodes import (
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
)
from batchgen.grading.mathematics.tokens import Token, tokens_of
from batchgen.grading.mathematics.units import unit_name

_RELATIONS = {
    "=": "=", "ne": "!=", "<": "<", ">": ">", "le": "<=", "ge": ">=", "approx": "~", "in": "in",
    "equiv": "equiv", "to": "to", "cong": "cong", "sim": "sim", "parallel": "parallel",
    "perp": "perp", "notin": "notin", "subset": "subset", "subseteq": "subset",
    "implies": "implies", "iff": "iff",
}  # fmt: skip
_CLOSING = {"(": (")", "]"), "[": ("]", ")"), "{": ("}",), "{set": ("}set",), "langle": ("rangle",)}
_SETS = {"cup": "|", "cap": "&", "setminus": "-"}
_MONEY = {"$": "$", "€": "€", "£": "£", "¥": "yen", "₹": "₹"}
_JOINING = {"and", "or", "und", "oder"}


def read(text: str, thousands: bool = True) -> Node:
    """The answer that a tidy text says.

    Args:
        thousands: whether `1,000` is one number.

    Raises:
        NotRead: it is nothing of what is understood here.
    """
    tokens = tokens_of(text, thousands)
    if not tokens:
        raise NotRead
    if (choice := _choice(tokens)) is not None:
        return choice
    return _read(tokens)


def _read(tokens: list[Token]) -> Node:
    return _Answer(Cursor(tokens)).whole()


def _choice(tokens: list[Token]) -> Node | None:
    """A letter in parentheses and, perhaps, the choice's text behind it."""
    texts = [token.text for token in tokens[:3]]
    if tokens[0].kind == "letter" and tokens[0].text.isupper() and len(tokens) > 1:
        ended = texts[1] == ")" or (texts[1] in (".", ":") and len(tokens) > 2 and tokens[2].spaced)
        if ended and tokens[2:3] != [] and tokens[2].kind == "letter" and not tokens[2].quoted:
            return None
        if ended:
            return _choice_of(texts[0], tokens[2:])
        return None
    if len(texts) < 3 or (texts[0], texts[2]) != ("(", ")") or tokens[1].kind != "letter":
        return None
    if not texts[1].isupper():
        return None
    if len(tokens) > 3 and not (tokens[0].quoted or tokens[3].spaced):
        return None
    if len(tokens) > 3 and (tokens[3].text in (",", ";") or tokens[3].text.lower() in _JOINING):
        return None
    return _choice_of(texts[1], tokens[3:])


def _choice_of(letter: str, rest: list[Token]) -> Node:
    if not rest:
        return Symbol(letter)
    try:
        return Choice(letter, _read(rest))
    except NotRead:
        return Choice(letter, Words(" ".join(token.text for token in rest)))


class _Answer:
    """Reads an answer from a cursor."""

    def __init__(self, cursor: Cursor) -> None:
        self.cursor = cursor
        self.expressions = Expressions(cursor, self.bracket)

    def whole(self) -> Node:
        """The answer that all tokens say."""
        result = self.listing()
        if not self.cursor.done:
            raise NotRead
        return result

    def listing(self, *closing: str) -> Node:
        """Clauses with commas, semicolons or words between them."""
        with self.cursor.deeper():
            groups: list[list[Node]] = [[]]
            joined = ","
            while True:
                groups[-1] += self.clause()
                if self.cursor.accept(","):
                    if word := self._joining():
                        joined = word
                    elif self.cursor.done or self.cursor.is_sign(*closing):
                        break
                elif self.cursor.accept(";"):
                    groups.append([])
                elif word := self._joining():
                    joined = word
                elif self.cursor.accept("mid") and "}set" in closing:
                    return Builder(_only(groups), self.listing(*closing))
                else:
                    break
            items = [_joined(group, joined) for group in groups]
            return _joined(items, ";" if len(items) > 1 else joined)

    def _joining(self) -> str | None:
        token = self.cursor.next
        if token.kind == "word" and token.text.lower() in _JOINING:
            self.cursor.take()
            return {"und": "and", "oder": "or"}.get(token.text.lower(), token.text.lower())
        return None

    def clause(self) -> list[Node]:
        """The answers of a relation or a value: two of them where it has a plus-minus sign."""
        start = self.cursor.at
        signs = self._signs_of_clause()
        if not signs:
            return [self.relation()]
        tokens, answers = list(self.cursor.tokens), []
        for plus in (True, False):
            for at in signs:
                upper = plus == (tokens[at].text == "pm")
                self.cursor.tokens[at] = Token("sign", "+" if upper else "-", tokens[at].spaced)
            self.cursor.at = start
            answers.append(self.relation())
            # Digits that commands took apart are one number again.
            consumed = self.cursor.at
            self.cursor.tokens = list(tokens)
        self.cursor.at = consumed
        return answers

    def _signs_of_clause(self) -> list[int]:
        """Where the plus-minus signs of the clause that comes next stand."""
        depth, signs = 0, []
        for at in range(self.cursor.at, len(self.cursor.tokens)):
            token = self.cursor.tokens[at]
            if token.kind == "sign":
                depth += {"(": 1, "[": 1, "{": 1, "{set": 1}.get(token.text, 0)
                depth -= {")": 1, "]": 1, "}": 1, "}set": 1}.get(token.text, 0)
                if token.text in ("pm", "mp"):
                    signs.append(at)
                if depth < 0 or (depth == 0 and token.text in (",", ";")):
                    break
            elif token.kind == "word" and token.text.lower() in _JOINING:
                break
        return signs

    def relation(self) -> Node:
        """A side, or several with relations between them."""
        sides, names = [self.side()], []
        while self.cursor.next.kind == "sign" and self.cursor.next.text in _RELATIONS:
            names.append(_RELATIONS[self.cursor.take().text])
            sides.append(self.side())
        return Relation(tuple(sides), tuple(names)) if names else sides[0]

    def side(self) -> Node:
        """A set with operations, a ratio, a quantity or an expression."""
        if (words := self._name_in_words()) is not None:
            return words
        result = self._ratio()
        while self.cursor.is_sign(*_SETS):
            name = _SETS[self.cursor.take().text]
            result = SetOperation(name, result, self._ratio())
        return result

    def _name_in_words(self) -> Node | None:
        """Words before an equals sign, as in `Total area = 5`: the name of a value."""
        ahead = 0
        while self.cursor.peek(ahead).kind in ("word", "letter"):
            ahead += 1
        tokens = [self.cursor.peek(at) for at in range(ahead)]
        if self.cursor.peek(ahead).text != "=" or not any(t.kind == "word" for t in tokens):
            return None
        self.cursor.at += ahead
        return Symbol(" ".join(token.text for token in tokens))

    def _ratio(self) -> Node:
        items = [self._quantity()]
        while self.cursor.accept(":"):
            items.append(self._quantity())
        return Ratio(tuple(items)) if len(items) > 1 else items[0]

    def _quantity(self) -> Node:
        negative = self.cursor.is_sign("-") and self.cursor.peek(1).text in _MONEY
        if negative:
            self.cursor.take()
        money = self.cursor.accept(*_MONEY)
        if money is None:
            value = self._set_or_sum()
        else:
            value = self.expressions.sum()
            value = Call("negate", (value,)) if negative else value
        unit = self._unit(counted=not variables_of(value))
        if money is None and self.cursor.is_sign(*_MONEY):
            money = self.cursor.take().text
        if money is not None:
            return Quantity(value, _MONEY[money])
        if unit is None:
            return value
        first = Quantity(value, unit)
        if unit and self.cursor.next.kind == "number":  # `3 hours 20 minutes`
            return Listing((first, self._quantity()), "and")
        return first

    def _unit(self, counted: bool) -> str | None:
        """The unit behind a value, read; None if none follows.

        Args:
            counted: whether words that name things may follow as well (`18 eggs`).
        """
        if self.cursor.next.kind not in ("word", "letter") and not self._begins_unit():
            return None
        if not counted and self.cursor.next.text == "in":  # `x in [1, 2]`
            return None
        end = self._end_of_words()
        for last in range(end, self.cursor.at, -1):
            words = [token.text for token in self.cursor.tokens[self.cursor.at : last]]
            if (name := unit_name(words)) is not None:
                self.cursor.at = last
                self._things()
                return name
        return "" if counted and self._things() else None

    def _begins_unit(self) -> bool:
        return self.cursor.is_sign("/", "(") and self.cursor.peek(1).kind == "word"

    def _end_of_words(self) -> int:
        """Where what may belong to a unit ends."""
        end, depth, allowed = self.cursor.at, 0, {"^", "/", "{", "}", "*", "-", ".", "(", ")"}
        for end in range(self.cursor.at, len(self.cursor.tokens) + 1):
            if end == len(self.cursor.tokens):
                break
            token = self.cursor.tokens[end]
            if token.kind == "word" and token.text.lower() in _JOINING:
                break
            if token.kind == "sign":
                depth += {"{": 1, "(": 1, "}": -1, ")": -1}.get(token.text, 0)
                if token.text not in allowed or depth < 0:
                    break
            if token.kind not in ("word", "letter", "number", "sign"):
                break
        return end

    def _things(self) -> bool:
        """Whether words that name what is counted follow (`18 eggs per day`), which are read."""
        rest = self.cursor.tokens[self.cursor.at :]
        words = []
        for token in rest:
            if token.kind == "sign" and token.text in (",", ";", ")", "}", "]", "}set"):
                break
            if token.kind == "word" and token.text.lower() in _JOINING:
                break
            if token.kind not in ("word", "letter") and token.text not in ("/", "-", ".", "'", "%"):
                return False
            if token.kind == "letter" and not token.quoted:
                return False
            words.append(token)
        if not words or not any(token.kind == "word" for token in words):
            return False
        if {token.text.lower() for token in words} & _NO_THINGS:
            return False
        self.cursor.at += len(words)
        return True

    def _set_or_sum(self) -> Node:
        if self.cursor.accept("emptyset"):
            return Group("{set", (), "}set")
        if self.cursor.accept("reals"):
            return Group("(", (Call("negate", (Symbol("oo"),)), Symbol("oo")), ")")
        if self.cursor.next.kind == "sign" and self.cursor.next.text.startswith("set "):
            return Symbol(self.cursor.take().text)
        if self.cursor.accept("angle", "triangle", "%"):
            return self._set_or_sum()
        if self.cursor.next.kind == "word":
            return self._words()
        return self.expressions.sum()

    def _words(self) -> Node:
        """Words to the end of the clause."""
        words: list[str] = []
        while self.cursor.next.kind in ("word", "letter", "number"):
            if self.cursor.next.text.lower() in _JOINING:
                break
            words.append(self.cursor.take().text)
        return Words(" ".join(words))

    def bracket(self, opening: str) -> Node:
        """What stands in brackets whose opening one was read."""
        closing = _CLOSING[opening]
        if self.cursor.accept(*closing):
            if opening == "{set":
                return Group(opening, (), "}set")
            raise NotRead
        if opening == "{":
            inner = self.listing("}")
            self.cursor.expect("}")
            return inner
        return self._items(opening, partial(self.listing, *closing))

    def _items(self, opening: str, listing: partial[Node]) -> Node:
        inner = listing()
        if opening == "{set" and self.cursor.is_sign("|", ":"):
            self.cursor.take()
            inner = Builder(inner, listing())
        elif opening == "{set" and isinstance(inner, Relation):
            first = inner.sides[0]
            if isinstance(first, Ratio) and len(first.items) == 2:  # its colon is that of a builder
                condition = Relation((first.items[1], *inner.sides[1:]), inner.names)
                inner = Builder(first.items[0], condition)
        close = self.cursor.expect(*_CLOSING[opening])
        if isinstance(inner, Builder):
            return inner
        listed = isinstance(inner, Listing) and inner.joined in (",", ";")
        items = inner.items if listed and isinstance(inner, Listing) else (inner,)
        if opening == "langle":
            return Group("(", items, ")")
        if opening == "{set" or len(items) > 1:
            return Group(opening, items, close)
        if opening == "(" and close == ")":
            return inner
        if opening == "[" and close == "]" and not isinstance(inner, Relation | Listing):
            return inner
        raise NotRead


_NO_THINGS = {
    "or", "so", "more", "less", "than", "times", "half", "least", "most", "not", "mod", "base",
    "of",
    "to", "is", "are", "between", "if", "when", "where", "about", "except", "point", "pm",
    "am", "log", "sqrt", "pi", "infinity", "squared", "cubed", "over", "plus", "minus",
}  # fmt: skip


def _only(groups: list[list[Node]]) -> Node:
    if len(groups) != 1 or len(groups[0]) != 1:
        raise NotRead
    return groups[0][0]


def _joined(items: list[Node], joined: str) -> Node:
    return items[0] if len(items) == 1 else Listing(tuple(items), joined)


__all__ = ["Matrix", "NotRead", "Number", "read"]
