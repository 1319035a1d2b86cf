"""Formulas in LaTeX as MathML.

Written for texts of strangers, where libraries fall short: latex2mathml 3.81 puts text into the
page unescaped, does not know `aligned`, and ends in a dozen kinds of exceptions. Here a formula has
a greatest length and nesting has a bound, and what is not understood is shown as it is written.
Elements are those of MathML Core, which browsers draw themselves.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Collection
from functools import lru_cache

from markupsafe import Markup, escape

from batchgen.report.texts import symbols
from batchgen.report.texts.safe_text import visible

MOST_CHARACTERS = 5_000
"""A longer formula is shown as it is written."""
_DEEPEST = 40
_TOKENS = re.compile(r"\\[a-zA-Z]+\*?|\\.|\\|\d+(?:\.\d+)?|\s+|.", re.DOTALL)
_FENCES = frozenset("()[]{}|‖⟨⟩⌊⌋⌈⌉")
_TEXTS = frozenset(
    "text textrm textnormal textit textbf textsf texttt mbox hbox mathrm mathit mathsf mathtt "
    "operatorname operatorname* mathop".split()
)
_SIZES = re.compile(r"\\[bB]igg?[lrm]?")
_TABLES = {
    "pmatrix": "()", "bmatrix": "[]", "Bmatrix": "{}", "vmatrix": "||", "Vmatrix": "‖‖",
    "cases": "{ ", "dcases": "{ ", "rcases": " }", "array": "  ",
}  # fmt: skip
"""What stands around a table, by its name."""
_ALIGNED = re.compile(r"(align(ed|at|edat)?|split|eqnarray|gather(ed)?|equation|multline)\*?")
_CELL_ENDS = ("&", "\\\\", "\\cr", "\\end")


class _TooDeep(Exception):
    """Raised inside this module by a formula that is nested too deeply."""


@lru_cache(256)
def mathml(source: str, *, display: bool = False) -> Markup:
    """A formula as an element `math`, or as its source in an element `code`.

    Args:
        source: LaTeX without delimiters; any text.
        display: on a line of its own.
    """
    if len(source) <= MOST_CHARACTERS:
        try:
            content = _Parser(source).whole()
        except _TooDeep:
            pass
        else:
            shown = ' display="block"' if display else ""
            return Markup(f"<math{shown}>{content}</math>")
    return Markup("<code>{}</code>").format(visible(source))


def _tag(name: str, text: str) -> str:
    return f"<{name}>{escape(visible(text))}</{name}>"


def _row(nodes: list[str]) -> str:
    return nodes[0] if len(nodes) == 1 else f"<mrow>{''.join(nodes)}</mrow>"


def _fence(text: str) -> str:
    return f"<mo>{escape(visible(text))}</mo>" if text.strip() else ""


def _character(text: str) -> str:
    """A character that is no command."""
    if text in _FENCES:
        return f'<mo stretchy="false">{text}</mo>'
    if text[0].isdecimal():
        return _tag("mn", text)
    return _tag("mi" if text.isalpha() else "mo", "−" if text == "-" else text)


class _Parser:
    """Goes through the tokens of a formula once."""

    def __init__(self, source: str) -> None:
        self._tokens: list[str] = _TOKENS.findall(source)
        self._at = self._depth = 0

    def whole(self) -> str:
        """All of the formula. One with line breaks or columns is a table."""
        lines, more = [self._line(())], True
        while more:
            more = self._peek() in ("\\\\", "\\cr")
            if more:
                self._at += 1
                lines.append(self._line(()))
        if len(lines) == 1 and len(lines[0]) == 1:
            return lines[0][0]
        return self._table(lines, "aligned")

    def _peek(self) -> str:
        return self._tokens[self._at] if self._at < len(self._tokens) else ""

    def _next(self) -> str:
        token = self._peek()
        self._at += 1
        return token

    def _skip_spaces(self) -> None:
        while self._peek().isspace():
            self._at += 1

    def _nodes(self, ends: Collection[str]) -> list[str]:
        """The nodes up to one of the tokens, which is left to read, or to the end."""
        nodes: list[str] = []
        self._depth += 1
        if self._depth > _DEEPEST:
            raise _TooDeep
        while (token := self._peek()) and token not in ends:
            if token.isspace():
                self._at += 1
            elif node := self._scripted():
                nodes.append(node)
        self._depth -= 1
        return nodes

    def _scripted(self) -> str:
        """A node with its indices, powers and primes."""
        start = self._peek()
        base = "<mrow></mrow>" if start in ("^", "_", "'") else self._atom()
        below = above = ""
        primes = 0
        while True:
            self._skip_spaces()
            token = self._peek()
            if token in ("\\limits", "\\nolimits"):
                self._at += 1
            elif token == "'":
                self._at, primes = self._at + 1, primes + 1
            elif token == "_" and not below:
                self._at += 1
                below = self._argument()
            elif token == "^" and not above:
                self._at += 1
                above = self._argument()
            else:
                break
        if primes:
            above = _row([_tag("mo", "′" * primes), *[above] * bool(above)])
        if below or above:
            base = _with_scripts(base or "<mrow></mrow>", below, above)
        return f"<mrow>{base}{_space(0.17)}</mrow>" if start[1:] in symbols.FUNCTIONS else base

    def _argument(self) -> str:
        """What a command or a script applies to: a group or one node."""
        self._skip_spaces()
        token = self._peek()
        if token in ("", "}", "&", "\\\\", "\\right", "\\end"):
            return "<mrow></mrow>"
        self._depth += 1
        if self._depth > _DEEPEST:
            raise _TooDeep
        if len(token) > 1 and token.isdecimal():  # \frac12 is a half
            self._tokens[self._at] = token[1:]
            node = _tag("mn", token[0])
        elif token in ("^", "_"):
            self._at += 1
            node = _tag("mo", token)
        else:
            node = self._atom() or "<mrow></mrow>"
        self._depth -= 1
        return node

    def _group(self, close: str = "}") -> str:
        self._at += 1
        nodes = self._nodes((close,))
        self._at += 1
        return _row(nodes)

    def _raw(self) -> str:
        """The source of an argument in braces, or one token."""
        self._skip_spaces()
        if self._peek() != "{":
            return self._next()
        depth, parts = 0, list[str]()
        while token := self._next():
            depth += (token == "{") - (token == "}")
            if not depth:
                break
            parts.append(token)
        return "".join(parts[1:])

    def _optional(self) -> str | None:
        """An argument in brackets; None without."""
        self._skip_spaces()
        return self._group("]") if self._peek() == "[" else None

    def _atom(self) -> str:
        token = self._peek()
        if token == "{":
            return self._group()
        self._at += 1
        if token == "~":
            return _space(0.33)
        if token == "%" or not token.startswith("\\") or len(token) == 1:
            return _character(token)
        if _SIZES.fullmatch(token):
            self._skip_spaces()
            return self._delimiter(self._next())
        return self._command(token, token[1:])

    def _command(self, token: str, name: str) -> str:
        if (make := _COMMANDS.get(name.removesuffix("*"))) is not None:
            return make(self)
        if name in _TEXTS:
            return _text(name, self._raw())
        if name in symbols.ALPHABETS:
            text = self._raw()
            plain = text.isalnum()
            return _tag("mi", symbols.shaped(name, text)) if plain else _Nested(self).read(text)
        if name.removesuffix("*") in symbols.SPACES:
            name = name.removesuffix("*")
            if name == "hspace":
                self._raw()
            return _space(symbols.SPACES[name])
        if name in symbols.IGNORED:
            return ""
        if name in symbols.ACCENTS:
            sign = f'<mo stretchy="{_stretches(name)}">{symbols.ACCENTS[name]}</mo>'
            return f'<mover accent="true">{self._argument()}{sign}</mover>'
        if name in symbols.ACCENTS_BELOW:
            return f"<munder>{self._argument()}<mo>{symbols.ACCENTS_BELOW[name]}</mo></munder>"
        if name in symbols.FUNCTIONS:
            return _tag("mi", name)
        if name in symbols.LIMITS:
            return f'<mo movablelimits="true">{name}</mo>'
        if (found := symbols.symbol(name)) is not None:
            return _character(found)
        return _character(name) if len(name) == 1 and not name.isalnum() else _tag("mtext", token)

    def _delimiter(self, token: str) -> str:
        if token.startswith("\\") and len(token) > 1:
            return _fence(symbols.symbol(token[1:]) or token[1:])
        return _fence("" if token == "." else token)

    def _left_right(self) -> str:
        self._skip_spaces()
        nodes = [self._delimiter(self._next())]
        while True:
            nodes += self._nodes(("\\right", "\\middle", "}", "&", "\\\\", "\\end"))
            token = self._peek()
            if token not in ("\\right", "\\middle"):
                break
            self._at += 1
            self._skip_spaces()
            nodes.append(self._delimiter(self._next()))
            if token == "\\right":
                break
        return f"<mrow>{''.join(nodes)}</mrow>"

    def _line(self, ends: Collection[str]) -> list[str]:
        """The cells of a line of a table."""
        cells = ["".join(self._nodes((*_CELL_ENDS[:3], *ends)))]
        while self._peek() == "&":
            self._at += 1
            cells.append("".join(self._nodes((*_CELL_ENDS[:3], *ends))))
        return cells

    def _environment(self) -> str:
        name = self._raw()
        if name in ("array", "alignat", "alignedat") or name.startswith("alignat"):
            self._raw()
        lines = [self._line(("\\end",))]
        while self._peek() in ("\\\\", "\\cr"):
            self._at += 1
            if self._peek() == "[":
                self._optional()
            lines.append(self._line(("\\end",)))
        if self._next() == "\\end":
            self._raw()
        if lines[-1] == [""]:  # behind the last \\
            lines.pop()
        return self._table(lines, "aligned" if _ALIGNED.fullmatch(name) else name)

    def _table(self, lines: list[list[str]], name: str) -> str:
        fences = _TABLES.get(name.removesuffix("*"), "  ")
        kind = name if name in ("aligned", "cases") else "cases" if "cases" in name else "matrix"
        rows = "".join(
            f"<mtr>{''.join(f'<mtd>{cell}</mtd>' for cell in cells)}</mtr>" for cells in lines
        )
        table = f'<mtable class="{kind}">{rows}</mtable>'
        return f"<mrow>{_fence(fences[0])}{table}{_fence(fences[1])}</mrow>"

    def _fraction(self) -> str:
        return f"<mfrac>{self._argument()}{self._argument()}</mfrac>"

    def _binomial(self) -> str:
        both = f'<mfrac linethickness="0">{self._argument()}{self._argument()}</mfrac>'
        return f"<mrow><mo>(</mo>{both}<mo>)</mo></mrow>"

    def _root(self) -> str:
        index = self._optional()
        base = self._argument()
        return f"<msqrt>{base}</msqrt>" if index is None else f"<mroot>{base}{index}</mroot>"

    def _boxed(self) -> str:
        while self._optional() is not None:
            pass
        return f'<mrow class="boxed">{self._argument()}</mrow>'

    def _struck(self) -> str:
        return f'<mrow class="struck">{self._argument()}</mrow>'

    def _coloured(self) -> str:
        self._raw()
        return self._argument()

    def _dropped(self) -> str:
        self._raw()
        return ""

    def _phantom(self) -> str:
        return f"<mphantom>{self._argument()}</mphantom>"

    def _over(self) -> str:
        sign, base = self._argument(), self._argument()
        return f"<mover>{base}{sign}</mover>"

    def _under(self) -> str:
        sign, base = self._argument(), self._argument()
        return f"<munder>{base}{sign}</munder>"

    def _long_arrow(self) -> str:
        below = self._optional()
        above = self._argument()
        return _under_over("<mo>→</mo>", below or "", above)

    def _modulo(self) -> str:
        inside = f'<mi>mod</mi><mspace width="0.33em"></mspace>{self._argument()}'
        return f'<mrow>{_space(1.0)}<mo stretchy="false">(</mo>{inside}' + (
            '<mo stretchy="false">)</mo></mrow>'
        )

    def _negated(self) -> str:
        self._skip_spaces()
        token = self._next()
        name = token[1:] if token.startswith("\\") else token
        return _tag("mo", (symbols.symbol(name) or name or "/") + "\u0338")

    def _tagged(self) -> str:
        return _space(2.0) + _tag("mtext", f"({self._raw()})")

    def _stacked(self) -> str:
        return _Nested(self).read(self._raw())


class _Nested:
    """Reads a part of a formula again with a parser of its own, one level deeper."""

    def __init__(self, outer: _Parser) -> None:
        self._outer = outer

    def read(self, source: str) -> str:
        inner = _Parser(source)
        inner._depth = self._outer._depth + 8
        if inner._depth > _DEEPEST:
            raise _TooDeep
        return f"<mrow>{inner.whole()}</mrow>"


def _with_scripts(base: str, below: str, above: str) -> str:
    if "movablelimits" in base[:30] or base[4:5] in symbols.BIG or base[:10] == "<munder><m":
        return _under_over(base, below, above)
    if base.startswith("<mover") and "⏞" in base[-12:]:
        return _under_over(base, below, above)
    if below and above:
        return f"<msubsup>{base}{below}{above}</msubsup>"
    return f"<msub>{base}{below}</msub>" if below else f"<msup>{base}{above}</msup>"


def _under_over(base: str, below: str, above: str) -> str:
    if below and above:
        return f"<munderover>{base}{below}{above}</munderover>"
    return f"<munder>{base}{below}</munder>" if below else f"<mover>{base}{above}</mover>"


def _stretches(accent: str) -> str:
    return "true" if accent.startswith(("over", "wide")) else "false"


def _space(width: float) -> str:
    return f'<mspace width="{width}em"></mspace>'


def _text(name: str, text: str) -> str:
    text = re.sub(r"\\([{}$%&#_ ])", r"\1", text)
    return _tag("mi" if name.startswith(("operator", "math")) and text.isalnum() else "mtext", text)


_P = _Parser
_COMMANDS: dict[str, Callable[[_Parser], str]] = {
    **dict.fromkeys(("frac", "dfrac", "tfrac", "cfrac"), _P._fraction),
    **dict.fromkeys(("binom", "dbinom", "tbinom"), _P._binomial),
    **dict.fromkeys(("boxed", "fbox", "framebox"), _P._boxed),
    **dict.fromkeys(("cancel", "xcancel", "bcancel"), _P._struck),
    **dict.fromkeys(("textcolor", "colorbox"), _P._coloured),
    **dict.fromkeys(("color", "label", "vspace"), _P._dropped),
    **dict.fromkeys(("phantom", "hphantom", "vphantom"), _P._phantom),
    **dict.fromkeys(("overset", "stackrel"), _P._over),
    **dict.fromkeys(("xrightarrow", "xlongrightarrow"), _P._long_arrow),
    "underset": _P._under,
    "sqrt": _P._root,
    "left": _P._left_right,
    "begin": _P._environment,
    "pmod": _P._modulo,
    "bmod": lambda _: "<mo>mod</mo>",
    "not": _P._negated,
    "tag": _P._tagged,
    "substack": _P._stacked,
}  # fmt: skip
