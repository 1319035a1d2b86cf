"""Renders LaTeX formulas as MathML Core, which browsers draw without scripts.

Libraries are not safe for strangers' texts: latex2mathml 3.81 puts text into the page unescaped,
does not know `aligned`, and raises a dozen kinds of exceptions. Here length and nesting are
limited, and a formula that is not understood is shown as it is written.
"""

from __future__ import annotations

from functools import lru_cache

from markupsafe import Markup

from batchgen.pages.math.math_commands import COMMANDS
from batchgen.pages.math.math_parser import FormulaParser, TooDeepError
from batchgen.util.hidden import visible

MOST_CHARACTERS = 5_000
"""A longer formula is shown as it is written."""


@lru_cache(256)
def mathml(source: str, *, display: bool = False) -> Markup:
    """A formula as an element `math`, or as its source in an element `code`.

    Args:
        source: LaTeX without delimiters; any text.
        display: on a line of its own.
    """
    if len(source) <= MOST_CHARACTERS:
        try:
            content = FormulaParser(source, COMMANDS).whole()
        except TooDeepError:
            pass
        else:
            attributes = ' display="block"' if display else ""
            return Markup(f"<math{attributes}>{content}</math>")
    return Markup("<code>{}</code>").format(visible(source))
