"""Functions that make the MathML elements of LaTeX formulas, as HTML.

A *node* is the HTML of one element.
"""

from __future__ import annotations

import re

from markupsafe import escape

from batchgen.pages.math import math_symbols as symbols
from batchgen.util.hidden import visible

_FENCES = frozenset("()[]{}|‖⟨⟩⌊⌋⌈⌉")
EMPTY = "<mrow></mrow>"
"""The element in place of a missing part of a formula."""


def math_tag(name: str, text: str) -> str:
    """An element with a text."""
    return f"<{name}>{escape(visible(text))}</{name}>"


def math_row(nodes: list[str]) -> str:
    """Several nodes as one, in a row."""
    return nodes[0] if len(nodes) == 1 else f"<mrow>{''.join(nodes)}</mrow>"


def fence(text: str) -> str:
    """A bracket that grows with what is in it; empty for white space."""
    return f"<mo>{escape(visible(text))}</mo>" if text.strip() else ""


def character(text: str) -> str:
    """The element of one character: a digit, a letter or an operator."""
    if text in _FENCES:
        return f'<mo stretchy="false">{text}</mo>'
    if text[0].isdecimal():
        return math_tag("mn", text)
    return math_tag("mi" if text.isalpha() else "mo", "−" if text == "-" else text)


def with_scripts(base: str, below: str, above: str) -> str:
    """A node with its index and its power, one of which can be empty.

    They stand below and above the base if that is a limit (`movablelimits`), a sum or another of
    the BIG operators, or has something below it or a brace above it already.
    """
    if "movablelimits" in base[:30] or base[4:5] in symbols.BIG or base[:10] == "<munder><m":
        return under_over(base, below, above)
    if base.startswith("<mover") and "⏞" in base[-12:]:
        return under_over(base, below, above)
    if below and above:
        return f"<msubsup>{base}{below}{above}</msubsup>"
    return f"<msub>{base}{below}</msub>" if below else f"<msup>{base}{above}</msup>"


def under_over(base: str, below: str, above: str) -> str:
    """A node with what stands right below and above it."""
    if below and above:
        return f"<munderover>{base}{below}{above}</munderover>"
    return f"<munder>{base}{below}</munder>" if below else f"<mover>{base}{above}</mover>"


def stretches(accent: str) -> str:
    """Whether an accent grows with what is below it, as the value of an attribute."""
    return "true" if accent.startswith(("over", "wide")) else "false"


def space(width: float) -> str:
    """White space, its width in em."""
    return f'<mspace width="{width}em"></mspace>'


def text_node(name: str, text: str) -> str:
    """The element of the text that is the argument of the LaTeX command `name`, such as `text`."""
    text = re.sub(r"\\([{}$%&#_ ])", r"\1", text)
    return math_tag(
        "mi" if name.startswith(("operator", "math")) and text.isalnum() else "mtext", text
    )
