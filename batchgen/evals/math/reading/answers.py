"""A parser of answers: lists, relations, sets, quantities, and the expressions in them.

`Answers` makes nodes (`nodes.py`) from tokens; `expressions.py` reads the arithmetic.
"""

from __future__ import annotations

from functools import partial

from batchgen.evals.math.reading.cursor import Cursor
from batchgen.evals.math.reading.expressions import Expressions
from batchgen.evals.math.reading.nodes import (
    AnswerList,
    Bracketed,
    Builder,
    Call,
    Node,
    NotRead,
    Quantity,
    Ratio,
    Relation,
    SetOperation,
    Symbol,
    Words,
    variables_of,
)
from batchgen.evals.math.reading.tokens import Token
from batchgen.evals.math.reading.units_behind import unit_behind

_RELATIONS = {
    "=": "=", "ne": "!=", "<": "<", ">": ">", "le": "<=", "ge": ">=", "approx": "~", "in": "in",
    "equiv": "equiv", "to": "to", "cong": "cong", "sim": "sim", "parallel": "parallel",
    "perp": "perp", "notin": "notin", "subset": "subset", "subseteq": "subset",
    "implies": "implies", "iff": "iff",
}  # fmt: skip
"""Sign → the name of the relation in `Relation`."""
_CLOSING = {"(": (")", "]"), "[": ("]", ")"), "{": ("}",), "{set": ("}set",), "langle": ("rangle",)}
"""Opening bracket → the brackets that may close it; `{set` is that of a set, `{` that of LaTeX."""
_SETS = {"cup": "|", "cap": "&", "setminus": "-"}
"""Command → the name of the operation in `SetOperation`."""
# Sign of money → the short name of its unit.
_MONEY = {"$": "$", "€": "€", "£": "£", "¥": "yen", "₹": "₹"}


class Answers:
    """Reads an answer from a cursor. Each method reads as much as fits, and raises NotRead for a
    mistake."""

    def __init__(self, cursor: Cursor) -> None:
        self.cursor = cursor
        self.expressions = Expressions(cursor, self.bracket)
        self._colon_is_bar = False  # whether a colon is the bar of a set-builder

    def whole(self) -> Node:
        """The answer that all tokens make."""
        result = self.listing()
        if not self.cursor.done:
            raise NotRead
        return result

    def listing(self, *closing: str) -> Node:
        """Read clauses with commas, semicolons or words between them.

        Semicolons divide groups of clauses: `p=5, q=2; p=7, q=2` has two. A bar in a set makes it a
        `Builder`: `{x | x > 2}`.

        Args:
            closing: the signs that end the listing, which are not read; a comma may come before.
        """
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
                    if word == "or" and len(groups[-1]) > 1 and _are_relations(groups[-1]):
                        groups.append([])  # `x=1, y=2 or x=3, y=4`
                elif self.cursor.accept("mid") and "}set" in closing:
                    return Builder(_only(groups), self.listing(*closing))
                else:
                    break
            if len(groups) == 1:
                return _joined(groups[0], joined)
            return _joined([_joined(group, ",") for group in groups], ";")

    def _joining(self) -> str | None:
        """Read a word between answers (`and`, `or`), and return it in English; None if none
        follows."""
        token = self.cursor.next
        if token.joins:
            self.cursor.take()
            return {"und": "and", "oder": "or"}.get(token.text.lower(), token.text.lower())
        return None

    def clause(self) -> list[Node]:
        """Read a relation or a value: two of them if it has a plus-minus sign.

        For `x = 1 \\pm 2` the tokens are read twice, first with + and then with - in its place.
        """
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
            # Restore the tokens, whose numbers reading may have split into digits.
            consumed = self.cursor.at
            self.cursor.tokens = list(tokens)
        self.cursor.at = consumed
        return answers

    def _signs_of_clause(self) -> list[int]:
        """The indices of the plus-minus signs in the next clause."""
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
            elif token.joins:
                break
        return signs

    def relation(self) -> Node:
        """Read a side, or several with relations between them."""
        sides, names = [self.side()], []
        while self.cursor.next.kind == "sign" and self.cursor.next.text in _RELATIONS:
            names.append(_RELATIONS[self.cursor.take().text])
            sides.append(self.side())
        return Relation(tuple(sides), tuple(names)) if names else sides[0]

    def side(self) -> Node:
        """Read a set with operations, a ratio, a quantity or an expression."""
        if (words := self._name_in_words()) is not None:
            return words
        result = self._ratio()
        while self.cursor.is_sign(*_SETS):
            name = _SETS[self.cursor.take().text]
            result = SetOperation(name, result, self._ratio())
        return result

    def _name_in_words(self) -> Node | None:
        """Read the name of a value before an equals sign: `Total area`, `p(x)`; None if there is
        none."""
        function, opening, argument, closing, equals = map(self.cursor.peek, range(5))
        if (opening.text, closing.text, equals.text) == ("(", ")", "="):
            if function.kind == "letter" and argument.kind in ("letter", "number"):
                self.cursor.at += 4
                return Symbol(f"{function.text}({argument.text})")
        ahead = 0
        while self.cursor.peek(ahead).kind in ("word", "letter"):
            ahead += 1
        tokens = [self.cursor.peek(at) for at in range(ahead)]
        if self.cursor.peek(ahead).text != "=" or not any(t.kind == "word" for t in tokens):
            return None
        if "not" in [token.text for token in tokens]:
            raise NotRead
        self.cursor.at += ahead
        return Symbol(" ".join(token.text for token in tokens))

    def _ratio(self) -> Node:
        """Read a quantity, or several with colons between them."""
        items = [self._quantity()]
        while not self._colon_is_bar and self.cursor.accept(":"):
            items.append(self._quantity())
        return Ratio(tuple(items)) if len(items) > 1 else items[0]

    def _quantity(self) -> Node:
        """Read a value with its unit or sign of money: `18 cm`, `-$5`, `3 hours 20 minutes`."""
        negative = self.cursor.is_sign("-") and self.cursor.peek(1).text in _MONEY
        if negative:
            self.cursor.take()
        money = self.cursor.accept(*_MONEY)
        if money is None:
            value = self._set_or_sum()
        else:
            value = self.expressions.sum()
            value = Call("negate", (value,)) if negative else value
        unit = unit_behind(self.cursor, counted=not variables_of(value))
        if money is None and self.cursor.is_sign(*_MONEY):
            money = self.cursor.take().text
        if money is not None:
            return Quantity(value, _MONEY[money])
        if unit is None:
            return value
        first = Quantity(value, *unit)
        if not first.unit or self.cursor.next.kind != "number":
            return first
        other = self._quantity()  # `3 hours 20 minutes`
        if not isinstance(other, Quantity) or other.unit != first.unit:
            raise NotRead
        return Quantity(Call("+", (first.measured, other.measured)), first.unit)

    def _set_or_sum(self) -> Node:
        """Read a set that is one sign, a figure, words, or an expression."""
        if self.cursor.accept("emptyset"):
            return Bracketed("{set", (), "}set")
        if self.cursor.accept("reals"):
            return Bracketed("(", (Call("negate", (Symbol("oo"),)), Symbol("oo")), ")")
        if self.cursor.next.kind == "sign" and self.cursor.next.text.startswith("set "):
            return Symbol(self.cursor.take().text)
        if self.cursor.is_sign("angle", "triangle"):
            return self._figure()
        if self.cursor.accept("%"):
            return self._set_or_sum()
        if self.cursor.next.kind == "word":
            return self._words()
        return self.expressions.sum()

    def _figure(self) -> Node:
        """Read an angle or a triangle, named by the letters of its points."""
        name = self.cursor.take().text
        while self.cursor.next.kind == "letter":
            name += " " + self.cursor.take().text
        return Symbol(name)

    def _words(self) -> Node:
        """Read words to the end of the clause."""
        words: list[str] = []
        while self.cursor.next.kind in ("word", "letter", "number"):
            if self.cursor.next.joins:
                break
            words.append(self.cursor.take().text)
        return Words(" ".join(words))

    def bracket(self, opening: str) -> Node:
        """Read the content and the closing bracket, after the opening one was read."""
        closing = _CLOSING[opening]
        if self.cursor.accept(*closing):
            if opening == "{set":
                return Bracketed(opening, (), "}set")
            raise NotRead
        if opening == "{":
            inner = self.listing("}")
            self.cursor.expect("}")
            return inner
        return self._items(opening, partial(self.listing, *closing))

    def _items(self, opening: str, listing: partial[Node]) -> Node:
        """Read the content and the closing bracket of a set, a point, an interval or a value."""
        outside, self._colon_is_bar = self._colon_is_bar, opening == "{set"
        inner = listing()
        if opening == "{set" and self.cursor.accept("|", ":"):
            inner = Builder(inner, listing())
        self._colon_is_bar = outside
        close = self.cursor.expect(*_CLOSING[opening])
        if isinstance(inner, Builder):
            return inner
        listed = isinstance(inner, AnswerList) and inner.joined in (",", ";")
        items = inner.items if listed and isinstance(inner, AnswerList) else (inner,)
        if opening == "langle":
            return Bracketed("(", items, ")")
        if opening == "{set" or len(items) > 1:
            return Bracketed(opening, items, close)
        if opening == "(" and close == ")":
            return inner
        if opening == "[" and close == "]" and not isinstance(inner, Relation | AnswerList):
            return inner
        raise NotRead


def _are_relations(nodes: list[Node]) -> bool:
    return all(isinstance(node, Relation) for node in nodes)


def _only(groups: list[list[Node]]) -> Node:
    if len(groups) != 1 or len(groups[0]) != 1:
        raise NotRead
    return groups[0][0]


def _joined(items: list[Node], joined: str) -> Node:
    return items[0] if len(items) == 1 else AnswerList(tuple(items), joined)
