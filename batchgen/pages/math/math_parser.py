"""Parses LaTeX formulas token by token into MathML, with a limit on nesting. `mathml.py` calls
`FormulaParser.whole`; a *node* is the HTML of one MathML element.

`x^2` → `<msup><mi>x</mi><mn>2</mn></msup>`.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Collection, Mapping

from batchgen.pages.math import math_symbols as symbols
from batchgen.pages.math.math_elements import (
    EMPTY,
    character,
    fence,
    math_row,
    math_tag,
    space,
    stretches,
    text_node,
    with_scripts,
)

_DEEPEST = 40
"""The maximum depth of nesting."""
_TOKENS = re.compile(r"\\[a-zA-Z]+\*?|\\.|\\|\d+(?:\.\d+)?|\s+|.", re.DOTALL)
"""A token: a command, an escaped character, a number, white space, or one other character."""
_TEXTS = frozenset(
    "text textrm textnormal textit textbf textsf texttt mbox hbox mathrm mathit mathsf mathtt "
    "operatorname operatorname* mathop".split()
)
"""The commands whose argument is text."""
_SIZES = re.compile(r"\\[bB]igg?[lrm]?")
"""The commands that set the size of the delimiter after them."""
_TABLES = {
    "pmatrix": "()", "bmatrix": "[]", "Bmatrix": "{}", "vmatrix": "||", "Vmatrix": "‖‖",
    "cases": "{ ", "dcases": "{ ", "rcases": " }", "array": "  ",
}  # fmt: skip
"""The fences around a table, by the name of its environment."""
CELL_ENDS = ("&", "\\\\", "\\cr")
"""The tokens that end a cell of a table."""


class TooDeepError(Exception):
    """Raised for a formula that is nested too deeply."""


class FormulaParser:
    """Reads the tokens of a formula once, from left to right. Its methods may raise TooDeepError.

    Args:
        source: LaTeX without delimiters.
        commands: the functions of commands that take arguments, by name.
        depth: how deeply the formula is nested in another one.
    """

    def __init__(self, source: str, commands: Commands, depth: int = 0) -> None:
        self._tokens: list[str] = _TOKENS.findall(source)
        self._commands = commands
        self._at, self._depth = 0, depth

    def whole(self) -> str:
        """Parse the whole formula. A formula with line breaks or columns becomes a table."""
        lines = [self.line(())]
        while self.peek() in ("\\\\", "\\cr"):
            self._at += 1
            lines.append(self.line(()))
        if len(lines) == 1 and len(lines[0]) == 1:
            return lines[0][0]
        return self.table(lines, "aligned")

    def peek(self) -> str:
        """Return the next token without reading it; empty at the end."""
        return self._tokens[self._at] if self._at < len(self._tokens) else ""

    def next(self) -> str:
        """Read the next token; empty at the end."""
        token = self.peek()
        self._at += 1
        return token

    def skip_spaces(self) -> None:
        while self.peek().isspace():
            self._at += 1

    def nodes(self, ends: Collection[str]) -> list[str]:
        """Parse nodes until one of the tokens `ends`, which stays unread, or the end."""
        nodes: list[str] = []
        self._depth += 1
        if self._depth > _DEEPEST:
            raise TooDeepError
        while (token := self.peek()) and token not in ends:
            if token.isspace():
                self._at += 1
            elif node := self.scripted():
                nodes.append(node)
        self._depth -= 1
        return nodes

    def scripted(self) -> str:
        """Parse a node with its subscripts, superscripts and primes."""
        start = self.peek()
        base = EMPTY if start in ("^", "_", "'") else self.atom()
        below = above = ""
        primes = 0
        while True:
            self.skip_spaces()
            token = self.peek()
            if token in ("\\limits", "\\nolimits"):
                self._at += 1
            elif token == "'":
                self._at, primes = self._at + 1, primes + 1
            elif token == "_" and not below:
                self._at += 1
                below = self.argument()
            elif token == "^" and not above:
                self._at += 1
                above = self.argument()
            else:
                break
        if primes:
            above = math_row([math_tag("mo", "′" * primes), *[above] * bool(above)])
        if below or above:
            base = with_scripts(base or EMPTY, below, above)
        return f"<mrow>{base}{space(0.17)}</mrow>" if start[1:] in symbols.FUNCTIONS else base

    def argument(self) -> str:
        """Parse the argument of a command or of a script: a group or one node."""
        self.skip_spaces()
        token = self.peek()
        if token in ("", "}", "&", "\\\\", "\\right", "\\end"):
            return EMPTY
        self._depth += 1
        if self._depth > _DEEPEST:
            raise TooDeepError
        if len(token) > 1 and token.isdecimal():  # \frac12 is one half: take one digit
            self._tokens[self._at] = token[1:]
            node = math_tag("mn", token[0])
        elif token in ("^", "_"):
            self._at += 1
            node = math_tag("mo", token)
        else:
            node = self.atom() or EMPTY
        self._depth -= 1
        return node

    def group(self, close: str = "}") -> str:
        """Parse a group: the next token opens it, and `close` closes it."""
        self._at += 1
        nodes = self.nodes((close,))
        self._at += 1
        return math_row(nodes)

    def raw(self) -> str:
        """Return the LaTeX source of an argument in braces, or the next token."""
        self.skip_spaces()
        if self.peek() != "{":
            return self.next()
        depth, parts = 0, list[str]()
        while token := self.next():
            depth += (token == "{") - (token == "}")
            if not depth:
                break
            parts.append(token)
        return "".join(parts[1:])

    def optional(self) -> str | None:
        """Parse an argument in brackets; None if there is none."""
        self.skip_spaces()
        return self.group("]") if self.peek() == "[" else None

    def atom(self) -> str:
        """Parse a node without scripts; empty for a command that shows nothing."""
        token = self.peek()
        if token == "{":
            return self.group()
        self._at += 1
        if token == "$":  # delimits a formula inside a text, such as \boxed{$x$}
            return ""
        if token == "~":
            return space(0.33)
        if token == "%" or not token.startswith("\\") or len(token) == 1:
            return character(token)
        if _SIZES.fullmatch(token):
            self.skip_spaces()
            return self.delimiter(self.next())
        return self.command(token, token[1:])

    def command(self, token: str, name: str) -> str:
        """Parse the node of a command whose token has been read."""
        if (make := self._commands.get(name.removesuffix("*"))) is not None:
            return make(self)
        if name in _TEXTS:
            return text_node(name, self.raw())
        if name in symbols.ALPHABETS:
            text = self.raw()
            plain = text.isalnum()
            return math_tag("mi", symbols.shaped(name, text)) if plain else self.nested(text)
        if (width := symbols.SPACES.get(name.removesuffix("*"))) is not None:
            if name.startswith("hspace"):
                self.raw()
            return space(width)
        if name in symbols.IGNORED:
            return ""
        if name in symbols.ACCENTS:
            sign = f'<mo stretchy="{stretches(name)}">{symbols.ACCENTS[name]}</mo>'
            return f'<mover accent="true">{self.argument()}{sign}</mover>'
        if name in symbols.ACCENTS_BELOW:
            return f"<munder>{self.argument()}<mo>{symbols.ACCENTS_BELOW[name]}</mo></munder>"
        if name in symbols.FUNCTIONS:
            return math_tag("mi", name)
        if name in symbols.LIMITS:
            return f'<mo movablelimits="true">{name}</mo>'
        if (symbol := symbols.symbol(name)) is not None:
            return character(symbol)
        return (
            character(name) if len(name) == 1 and not name.isalnum() else math_tag("mtext", token)
        )

    def delimiter(self, token: str) -> str:
        """Return the node of a delimiter such as a bracket; empty for a dot."""
        if token.startswith("\\") and len(token) > 1:
            return fence(symbols.symbol(token[1:]) or token[1:])
        return fence("" if token == "." else token)

    def line(self, ends: Collection[str]) -> list[str]:
        """Parse the cells of one line of a table."""
        # Cells end at CELL_ENDS, and the line at any of these but "&".
        cells = ["".join(self.nodes((*CELL_ENDS, *ends)))]
        while self.peek() == "&":
            self._at += 1
            cells.append("".join(self.nodes((*CELL_ENDS, *ends))))
        return cells

    def table(self, lines: list[list[str]], name: str) -> str:
        """Return a table of lines of cells, between the fences of the environment `name`."""
        fences = _TABLES.get(name.removesuffix("*"), "  ")
        kind = name if name in ("aligned", "cases") else "cases" if "cases" in name else "matrix"
        rows = "".join(
            f"<mtr>{''.join(f'<mtd>{cell}</mtd>' for cell in cells)}</mtr>" for cells in lines
        )
        table = f'<mtable class="{kind}">{rows}</mtable>'
        return f"<mrow>{fence(fences[0])}{table}{fence(fences[1])}</mrow>"

    def nested(self, source: str) -> str:
        """Parse `source`, a part of this formula, with a new parser. It counts as eight levels of
        nesting."""
        depth = self._depth + 8
        if depth > _DEEPEST:
            raise TooDeepError
        return f"<mrow>{FormulaParser(source, self._commands, depth).whole()}</mrow>"


Commands = Mapping[str, Callable[[FormulaParser], str]]
"""The functions of commands, by their names without a backslash."""
