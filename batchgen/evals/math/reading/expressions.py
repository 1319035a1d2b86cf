"""A parser of mathematical expressions: sums, products, powers, functions, brackets. `Answers` uses
it for the arithmetic in answers.

    `2x - 1`  →  Call("+", (Call("*", (2, x)), Call("negate", (1,))))
"""

from __future__ import annotations

from collections.abc import Callable
from fractions import Fraction

from batchgen.evals.math.reading.cursor import Cursor
from batchgen.evals.math.reading.nodes import (
    Call,
    Matrix,
    Node,
    NotRead,
    Number,
    Symbol,
)
from batchgen.evals.math.reading.tokens import SCALES
from batchgen.evals.math.reading.written_numbers import digit, read_number

# Names of functions in LaTeX → their names in `Call`.
_FUNCTION_NAMES = {
    "arcsin": "asin", "arccos": "acos", "arctan": "atan", "ln": "log", "lg": "log10",
}  # fmt: skip
# Opening bracket → closing bracket.
_OPENING = {"(": ")", "[": "]", "{": "}", "{set": "}set", "langle": "rangle"}
# Opening sign → the closing sign, and the function.
_FENCES = {"lfloor": ("rfloor", "floor"), "lceil": ("rceil", "ceil")}
_APPLIED = set("fghFGH")  # letters that name functions, so that `f(x)` is no product
_MINUS_ONE = Number(Fraction(-1))
_PERCENT = ("percent", "percentage", "pct")


class Expressions:
    """Reads expressions from a cursor.

    Each method reads as much as fits, and raises NotRead for a mistake. `bracket` reads the content
    and the closing bracket, after the opening one.
    """

    def __init__(self, cursor: Cursor, bracket: Callable[[str], Node]) -> None:
        self.cursor = cursor
        self._bracket = bracket

    def sum(self) -> Node:
        """Read terms with plus and minus between them."""
        with self.cursor.deeper():
            terms = [self._signed_term()]
            while self.cursor.is_sign("+", "-"):
                negative = self.cursor.take().text == "-"
                term = self._signed_term()
                terms.append(Call("negate", (term,)) if negative else term)
            return terms[0] if len(terms) == 1 else Call("+", tuple(terms))

    def _signed_term(self) -> Node:
        """Read a term with any number of signs before it."""
        negative = False
        while sign := self.cursor.accept("+", "-"):
            negative ^= sign == "-"
        term = self._term()
        return Call("negate", (term,)) if negative else term

    def _term(self) -> Node:
        """Read factors, with or without signs between them."""
        result = self._power()
        while True:
            if sign := self.cursor.accept("*", "/"):
                negative = False
                while minus := self.cursor.accept("-", "+"):
                    negative ^= minus == "-"
                factor = self._power()
                factor = Call("negate", (factor,)) if negative else factor
                result = Call(sign, (result, factor))
            elif self._starts_factor(result):
                result = Call("*", (result, self._power()))
            elif self.cursor.next.kind == "word" and self.cursor.next.text.lower() in SCALES:
                scale = Number(Fraction(SCALES[self.cursor.take().text.lower()]))
                result = Call("scale", (result, scale))
            else:
                return result

    def _starts_factor(self, before: Node) -> bool:
        """Whether a factor follows without a sign."""
        token = self.cursor.next
        if token.kind == "number":  # `2 3` is not a product
            return not isinstance(before, Number) and not self._ends_with_number()
        if token.kind in ("letter", "function"):
            return True
        if token.kind != "sign":
            return False
        if token.text in ("(", "{"):  # `10 (units)` is not a product
            return self.cursor.peek(1).kind != "word"
        return token.text in ("frac", "sqrt", "pi", "infty", "binom", *_FENCES)

    def _ends_with_number(self) -> bool:
        return self.cursor.at > 0 and self.cursor.tokens[self.cursor.at - 1].kind == "number"

    def _power(self) -> Node:
        """Read a factor with its exponents and other signs after it."""
        with self.cursor.deeper():
            return self._with_suffixes(self._factor())

    def _with_suffixes(self, result: Node) -> Node:
        """Read the signs after a factor: `^2`, `!`, `%`, degrees."""
        while True:
            if self._accept_degrees():
                result = Call(self._kind_of_degrees(), (result,))
            elif self.cursor.accept("^"):
                result = Call("^", (result, self._argument()))
            elif self.cursor.accept("!"):
                if self.cursor.is_sign("!"):  # a double factorial
                    raise NotRead
                result = Call("factorial", (result,))
            elif self.cursor.accept("%"):
                result = Call("percent", (result,))
            elif self.cursor.next.kind == "word" and self.cursor.next.text.lower() in _PERCENT:
                self.cursor.take()
                result = Call("percent", (result,))
            else:
                return result

    def _accept_degrees(self) -> bool:
        """Read a sign of degrees, raised or not; return whether there was one."""
        for signs in (["degree"], ["^", "degree"], ["^", "{", "degree", "}"]):
            if [self.cursor.peek(ahead).text for ahead in range(len(signs))] == signs:
                self.cursor.at += len(signs)
                return True
        return False

    def _kind_of_degrees(self) -> str:
        """The name of the operation. A letter after the sign means degrees of temperature."""
        if self.cursor.next.kind == "letter" and self.cursor.next.text in ("C", "F"):
            if self.cursor.peek(1).kind == "end of text":
                return "°" + self.cursor.take().text
        return "degree"

    def _argument(self) -> Node:
        """Read the argument of a command: a group in braces, or one digit, letter or command."""
        if self.cursor.is_sign("{"):
            return self._group()
        if self.cursor.accept("-"):
            return Call("negate", (self._argument(),))
        if self.cursor.next.kind == "number":
            return digit(self.cursor)
        with self.cursor.deeper():
            return self._factor()

    def _group(self) -> Node:
        opening = self.cursor.expect("{")
        return self._bracket(opening)

    def _factor(self) -> Node:
        """Read a number, a variable, a function, a matrix, or something in brackets."""
        token = self.cursor.take()
        if token.kind == "number":
            return read_number(self.cursor, token, self._argument)
        if token.kind == "letter":
            return self._symbol(token.text)
        if token.kind == "function":
            return self._function(token.text)
        if token.kind == "begin":
            return self._matrix(token.text)
        if token.kind != "sign":
            raise NotRead
        text = token.text
        if text in _OPENING:
            return self._bracket(text)
        if text == "frac":
            return Call("/", (self._argument(), self._argument()))
        if text == "binom":
            return Call("binomial", (self._argument(), self._argument()))
        if text in _FENCES:
            closing, name = _FENCES[text]
            inner = self.sum()
            self.cursor.expect(closing)
            return Call(name, (inner,))
        if text == "|":
            inner = self.sum()
            self.cursor.expect("|")
            return Call("abs", (inner,))
        if text in ("pi", "infty"):
            return Symbol({"infty": "oo"}.get(text, text))
        if text in ("overline", "bar", "overrightarrow"):
            inner = self._argument()
            if isinstance(inner, Symbol):
                return Symbol(f"{text} {inner.name}")
            return Symbol(f"{text} {_name_of(inner)}")
        if len(text) == 1 and text.isalpha():
            return self._symbol(text)
        raise NotRead

    def _symbol(self, name: str) -> Node:
        """Read a variable with its subscript and primes, or the value of a function such as
        `f(x)`."""
        if self.cursor.accept("_"):
            name += "_" + self.cursor.braced_text()
        while self.cursor.is_sign("'"):
            name += self.cursor.take().text
        if name[0] in _APPLIED and self.cursor.is_sign("("):
            start = self.cursor.at
            self.cursor.take()
            self._bracket("(")
            parts = self.cursor.tokens[start : self.cursor.at]
            name += "".join(token.text for token in parts)
        return Symbol(name)

    def _function(self, name: str) -> Node:
        """Read the exponent, subscript and argument of a function."""
        if name == "sqrt":
            return self._square_root()
        if name == "cbrt":
            (inner,) = self._function_arguments(name)
            return Call("^", (inner, Number(Fraction(1, 3))))
        base: Node | None = None
        exponent: Node | None = None
        for _ in range(2):  # in either order
            if self.cursor.accept("_"):
                base = self._argument()
            elif self.cursor.accept("^"):
                exponent = self._argument()
        arguments = self._function_arguments(name)
        if name == "log" and base is not None:
            arguments = (*arguments, base)
        elif base is not None:
            raise NotRead
        name = _FUNCTION_NAMES.get(name, name)
        if name == "log10":
            name, arguments = "log", (*arguments, Number(Fraction(10)))
        # `sin^{-1}` is the inverse function, and not the reciprocal.
        if exponent in (_MINUS_ONE, Call("negate", (Number(Fraction(1)),))):
            return Call("a" + name, arguments)
        result = Call(name, arguments)
        return result if exponent is None else Call("^", (result, exponent))

    def _square_root(self) -> Node:
        """Read the degree and the argument of a root: `\\sqrt[3]{x}`, `\\sqrt 2`."""
        degree: Node = Number(Fraction(2))
        if self.cursor.accept("["):
            degree = self.sum()
            self.cursor.expect("]")
        if self.cursor.next.kind == "number":
            inner: Node = Number(Fraction(self.cursor.take().text))
        else:
            inner = self._argument()
        return Call("^", (inner, Call("/", (Number(Fraction(1)), degree))))

    def _function_arguments(self, name: str) -> tuple[Node, ...]:
        """Read the arguments of a function: in brackets, or a product without brackets."""
        if self.cursor.is_sign("(", "{", "["):
            opening = self.cursor.take().text
            arguments = [self.sum()]
            while self.cursor.accept(","):
                arguments.append(self.sum())
            self.cursor.expect(_OPENING[opening])
            return tuple(arguments)
        # `\sin 2x + 1` is the sine of 2x; another function begins another factor
        with self.cursor.deeper():
            negative = self.cursor.accept("-") is not None
            result = self._power()
            while self.cursor.next.kind != "function" and self._starts_factor(result):
                if self.cursor.is_sign("("):
                    break
                result = Call("*", (result, self._power()))
            return (Call("negate", (result,)) if negative else result,)

    def _matrix(self, kind: str) -> Node:
        """Read the rows of a matrix up to its `\\end`."""
        rows: list[tuple[Node, ...]] = []
        if kind not in ("matrix", "pmatrix", "bmatrix", "Bmatrix", "array", "smallmatrix"):
            raise NotRead
        row: list[Node] = []
        while True:
            if self.cursor.next.kind == "end":
                self.cursor.take()
                if row:
                    rows.append(tuple(row))
                break
            row.append(self.sum())
            if self.cursor.accept("row"):
                rows.append(tuple(row))
                row = []
            elif self.cursor.next.kind != "end":
                self.cursor.expect("&")
        if not rows or len({len(items) for items in rows}) > 1:
            raise NotRead
        return Matrix(tuple(rows))


def _name_of(node: Node) -> str:
    """The name of a segment, such as `AB`."""
    if isinstance(node, Symbol):
        return node.name
    if isinstance(node, Call) and node.name == "*":
        return "".join(_name_of(part) for part in node.arguments)
    raise NotRead
