"""Renders LaTeX formulas as MathML Core, which browsers draw without scripts. The entry point is
`mathml`.

The formulas come from models and data sets, so they are untrusted. Libraries are not safe for them:
latex2mathml 3.81 puts text into the page unescaped, does not know `aligned`, and raises a dozen
kinds of exceptions. Here length and nesting are limited, and a formula that is too long or too deep
is shown as its source.
"""

from __future__ import annotations

from functools import lru_cache

from markupsafe import Markup

from batchgen.pages.math.math_commands import COMMANDS
from batchgen.pages.math.math_parser import FormulaParser, TooDeepError
from batchgen.util.hidden import visible

MOST_CHARACTERS = 5_000
"""The maximum length of a formula. A longer one is shown as its source."""


@lru_cache(256)
def mathml(source: str, *, display: bool = False) -> Markup:
    """Return a formula as an element `math`; or as its source in an element `code`, if it is too
    long or nested too deeply.

    Args:
        source: LaTeX without delimiters; any text.
        display: whether the formula is set on a line of its own.
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
