"""The LaTeX commands that take arguments: a function for each, which the parser of formulas
(`math_parser.py`) calls after it has read the command's token. Each returns the MathML of the
command. `mathml.py` passes COMMANDS to the parser.

For `\\frac{1}{2}` the function of `frac` parses both arguments and returns
`<mfrac><mn>1</mn><mn>2</mn></mfrac>`.
"""

from __future__ import annotations

import re
from collections.abc import Callable

from batchgen.pages.math import math_symbols as symbols
from batchgen.pages.math.math_elements import math_tag, space, under_over
from batchgen.pages.math.math_parser import Commands, FormulaParser

_ALIGNED = re.compile(r"(align(ed|at|edat)?|split|eqnarray|gather(ed)?|equation|multline)\*?")
"""The environments that align the lines of a formula."""


def _left_right(at: FormulaParser) -> str:
    """`\\left( … \\middle| … \\right)`: a formula between delimiters that grow with it."""
    at.skip_spaces()
    nodes = [at.delimiter(at.next())]
    while True:
        nodes += at.nodes(("\\right", "\\middle", "}", "&", "\\\\", "\\end"))
        token = at.peek()
        if token not in ("\\right", "\\middle"):
            break
        at.next()
        at.skip_spaces()
        nodes.append(at.delimiter(at.next()))
        if token == "\\right":
            break
    return f"<mrow>{''.join(nodes)}</mrow>"


def _environment(at: FormulaParser) -> str:
    """`\\begin{name} … \\end{name}`: a table."""
    name = at.raw()
    if name in ("array", "alignedat") or name.startswith("alignat"):
        at.raw()  # the columns, as in \begin{array}{cc}
    lines = [at.line(("\\end",))]
    while at.peek() in ("\\\\", "\\cr"):
        at.next()
        if at.peek() == "[":
            at.optional()
        lines.append(at.line(("\\end",)))
    if at.next() == "\\end":
        at.raw()
    if lines[-1] == [""]:  # after a final \\
        lines.pop()
    return at.table(lines, "aligned" if _ALIGNED.fullmatch(name) else name)


def _root(at: FormulaParser) -> str:
    """`\\sqrt[index]{base}`."""
    index = at.optional()
    base = at.argument()
    return f"<msqrt>{base}</msqrt>" if index is None else f"<mroot>{base}{index}</mroot>"


def _boxed(at: FormulaParser) -> str:
    """`\\boxed{…}`, with optional arguments that are ignored."""
    while at.optional() is not None:
        pass
    return f'<mrow class="boxed">{at.argument()}</mrow>'


def _coloured(at: FormulaParser) -> str:
    """`\\textcolor{colour}{…}`, without its colour."""
    at.raw()
    return at.argument()


def _dropped(at: FormulaParser) -> str:
    """A command with one argument that shows nothing."""
    at.raw()
    return ""


def _long_arrow(at: FormulaParser) -> str:
    """`\\xrightarrow[below]{above}`."""
    below = at.optional()
    above = at.argument()
    return under_over("<mo>→</mo>", below or "", above)


def _modulo(at: FormulaParser) -> str:
    """`\\pmod{…}`."""
    inside = f'<mi>mod</mi><mspace width="0.33em"></mspace>{at.argument()}'
    left, right = (f'<mo stretchy="false">{fence}</mo>' for fence in "()")
    return f"<mrow>{space(1.0)}{left}{inside}{right}</mrow>"


def _negated(at: FormulaParser) -> str:
    """`\\not` before a symbol, which is struck through."""
    at.skip_spaces()
    token = at.next()
    name = token[1:] if token.startswith("\\") else token
    return math_tag("mo", (symbols.symbol(name) or name or "/") + "\u0338")


def _filled(pattern: str) -> Callable[[FormulaParser], str]:
    """Return the function of a command that puts its one or two arguments into a pattern."""
    count = 1 + ("{1}" in pattern)
    return lambda at: pattern.format(*(at.argument() for _ in range(count)))


_PATTERNS = {
    ("frac", "dfrac", "tfrac", "cfrac"): "<mfrac>{0}{1}</mfrac>",
    ("binom", "dbinom", "tbinom"):
        '<mrow><mo>(</mo><mfrac linethickness="0">{0}{1}</mfrac><mo>)</mo></mrow>',
    ("cancel", "xcancel", "bcancel"): '<mrow class="struck">{0}</mrow>',
    ("phantom", "hphantom", "vphantom"): "<mphantom>{0}</mphantom>",
    ("overset", "stackrel"): "<mover>{1}{0}</mover>",
    ("underset",): "<munder>{1}{0}</munder>",
}  # fmt: skip
COMMANDS: Commands = {
    **{name: _filled(pattern) for names, pattern in _PATTERNS.items() for name in names},
    **dict.fromkeys(("boxed", "fbox", "framebox"), _boxed),
    **dict.fromkeys(("textcolor", "colorbox"), _coloured),
    **dict.fromkeys(("color", "label", "vspace"), _dropped),
    **dict.fromkeys(("xrightarrow", "xlongrightarrow"), _long_arrow),
    "sqrt": _root,
    "left": _left_right,
    "begin": _environment,
    "pmod": _modulo,
    "bmod": lambda _: "<mo>mod</mo>",
    "not": _negated,
    "tag": lambda at: space(2.0) + math_tag("mtext", f"({at.raw()})"),
    "substack": lambda at: at.nested(at.raw()),
}
"""The function of each command."""
