"""Functions that make the MathML elements of LaTeX formulas, as HTML. The parser of formulas calls
them.

A *node* is the HTML of one element.
"""

from __future__ import annotations

import re

from markupsafe import escape

from batchgen.pages.math import math_symbols as symbols
from batchgen.util.hidden import visible

_FENCES = frozenset("()[]{}|‖⟨⟩⌊⌋⌈⌉")
"""Brackets that keep their size unless `\\left` or `\\right` comes before them."""
EMPTY = "<mrow></mrow>"
"""The element for a missing part of a formula."""


def math_tag(name: str, text: str) -> str:
    """Return an element with a text, which is escaped."""
    return f"<{name}>{escape(visible(text))}</{name}>"


def math_row(nodes: list[str]) -> str:
    """Return several nodes as one, side by side."""
    return nodes[0] if len(nodes) == 1 else f"<mrow>{''.join(nodes)}</mrow>"


def fence(text: str) -> str:
    """Return a bracket that grows with its content; empty for white space."""
    return f"<mo>{escape(visible(text))}</mo>" if text.strip() else ""


def character(text: str) -> str:
    """Return the element of one character: a digit, a letter or an operator."""
    if text in _FENCES:
        return f'<mo stretchy="false">{text}</mo>'
    if text[0].isdecimal():
        return math_tag("mn", text)
    return math_tag("mi" if text.isalpha() else "mo", "−" if text == "-" else text)


def with_scripts(base: str, below: str, above: str) -> str:
    """Return a node with its subscript and its superscript, one of which can be empty.

    They are set below and above the base, instead of beside it, if the base is a limit
    (`movablelimits`), one of the BIG operators such as a sum, or has an element below it or a brace
    above it.
    """
    # base[4:5] is the operator of a base such as `<mo>∑</mo>`.
    if "movablelimits" in base[:30] or base[4:5] in symbols.BIG or base[:10] == "<munder><m":
        return under_over(base, below, above)
    if base.startswith("<mover") and "⏞" in base[-12:]:
        return under_over(base, below, above)
    if below and above:
        return f"<msubsup>{base}{below}{above}</msubsup>"
    return f"<msub>{base}{below}</msub>" if below else f"<msup>{base}{above}</msup>"


def under_over(base: str, below: str, above: str) -> str:
    """Return a node with others below and above it, one of which can be empty."""
    if below and above:
        return f"<munderover>{base}{below}{above}</munderover>"
    return f"<munder>{base}{below}</munder>" if below else f"<mover>{base}{above}</mover>"


def stretches(accent: str) -> str:
    """Return whether an accent grows with its base, as the value of an attribute."""
    return "true" if accent.startswith(("over", "wide")) else "false"


def space(width: float) -> str:
    """Return white space of a width in em."""
    return f'<mspace width="{width}em"></mspace>'


def text_node(name: str, text: str) -> str:
    """Return the element of a text, the argument of the LaTeX command `name`, such as `text`."""
    text = re.sub(r"\\([{}$%&#_ ])", r"\1", text)
    return math_tag(
        "mi" if name.startswith(("operator", "math")) and text.isalnum() else "mtext", text
    )
