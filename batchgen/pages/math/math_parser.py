"""Parses LaTeX formulas token by token into MathML, with a limit on nesting."""

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
_TOKENS = re.compile(r"\\[a-zA-Z]+\*?|\\.|\\|\d+(?:\.\d+)?|\s+|.", re.DOTALL)
_TEXTS = frozenset(
    "text textrm textnormal textit textbf textsf texttt mbox hbox mathrm mathit mathsf mathtt "
    "operatorname operatorname* mathop".split()
)
_SIZES = re.compile(r"\\[bB]igg?[lrm]?")
_TABLES = {
    "pmatrix": "()", "bmatrix": "[]", "Bmatrix": "{}", "vmatrix": "||", "Vmatrix": "‖‖",
    "cases": "{ ", "dcases": "{ ", "rcases": " }", "array": "  ",
}  # fmt: skip
"""The fences around a table, by the name of its environment."""
CELL_ENDS = ("&", "\\\\", "\\cr")
"""The tokens that end a cell of a table."""


class TooDeepError(Exception):
    """Raised by a formula that is nested too deeply."""


class FormulaParser:
    """Goes through the tokens of a formula once. Methods that read may raise TooDeepError.

    Args:
        source: LaTeX without delimiters.
        commands: by name, the functions of commands that take arguments.
        depth: how deeply the formula lies in another one.
    """

    def __init__(self, source: str, commands: Commands, depth: int = 0) -> None:
        self._tokens: list[str] = _TOKENS.findall(source)
        self._commands = commands
        self._at, self._depth = 0, depth

    def whole(self) -> str:
        """All of the formula. One with line breaks or columns is a table."""
        lines = [self.line(())]
        while self.peek() in ("\\\\", "\\cr"):
            self._at += 1
            lines.append(self.line(()))
        if len(lines) == 1 and len(lines[0]) == 1:
            return lines[0][0]
        return self.table(lines, "aligned")

    def peek(self) -> str:
        """The token that is read next; empty at the end."""
        return self._tokens[self._at] if self._at < len(self._tokens) else ""

    def next(self) -> str:
        """The token that is read; empty at the end."""
        token = self.peek()
        self._at += 1
        return token

    def skip_spaces(self) -> None:
        while self.peek().isspace():
            self._at += 1

    def nodes(self, ends: Collection[str]) -> list[str]:
        """The nodes up to one of the tokens, which stays unread, or to the end."""
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
        """A node with its indices, powers and primes."""
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
        """The argument of a command or a script: a group or one node."""
        self.skip_spaces()
        token = self.peek()
        if token in ("", "}", "&", "\\\\", "\\right", "\\end"):
            return EMPTY
        self._depth += 1
        if self._depth > _DEEPEST:
            raise TooDeepError
        if len(token) > 1 and token.isdecimal():  # \frac12 is a half
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
        """The content between the next token and the one that closes it."""
        self._at += 1
        nodes = self.nodes((close,))
        self._at += 1
        return math_row(nodes)

    def raw(self) -> str:
        """The source of an argument in braces, or one token."""
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
        """An argument in brackets; None without."""
        self.skip_spaces()
        return self.group("]") if self.peek() == "[" else None

    def atom(self) -> str:
        """A node without indices; empty for a command that shows nothing."""
        token = self.peek()
        if token == "{":
            return self.group()
        self._at += 1
        if token == "$":  # of a formula in a box
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
        """The node of a command whose token has been read."""
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
        """A bracket or the like; a dot is none."""
        if token.startswith("\\") and len(token) > 1:
            return fence(symbols.symbol(token[1:]) or token[1:])
        return fence("" if token == "." else token)

    def line(self, ends: Collection[str]) -> list[str]:
        """The cells of a line of a table."""
        cells = ["".join(self.nodes((*CELL_ENDS, *ends)))]
        while self.peek() == "&":
            self._at += 1
            cells.append("".join(self.nodes((*CELL_ENDS, *ends))))
        return cells

    def table(self, lines: list[list[str]], name: str) -> str:
        """A table of cells in lines, between the fences of the environment of that name."""
        fences = _TABLES.get(name.removesuffix("*"), "  ")
        kind = name if name in ("aligned", "cases") else "cases" if "cases" in name else "matrix"
        rows = "".join(
            f"<mtr>{''.join(f'<mtd>{cell}</mtd>' for cell in cells)}</mtr>" for cells in lines
        )
        table = f'<mtable class="{kind}">{rows}</mtable>'
        return f"<mrow>{fence(fences[0])}{table}{fence(fences[1])}</mrow>"

    def nested(self, source: str) -> str:
        """A part of the formula that is read again, some levels deeper."""
        depth = self._depth + 8
        if depth > _DEEPEST:
            raise TooDeepError
        return f"<mrow>{FormulaParser(source, self._commands, depth).whole()}</mrow>"


Commands = Mapping[str, Callable[[FormulaParser], str]]
"""The functions of commands, by their names without a backslash."""
