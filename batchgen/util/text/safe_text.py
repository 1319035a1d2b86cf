"""Puts texts of models and data sets into HTML safely: escaped, with hidden characters shown.

Any text in a page may be made to deceive. So templates escape every value, and show hidden
characters as codes: controls, marks of writing direction, and characters without width.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import cache
from typing import TYPE_CHECKING, Any
from urllib.parse import urlencode

from markupsafe import Markup, escape

from batchgen.util.hidden import HIDDEN, code_of, visible

if TYPE_CHECKING:
    from jinja2 import Environment

GAP = Markup(' <span class="gap">… {} characters left out …</span> ')
_SIGN = re.compile(r"[/,=]+(?=.)|\.(?=[A-Za-z])")
SPAN = Markup('<mark title="{}">{}</mark>')


def marked(text: str) -> Markup:
    """The text as HTML, in which codes of hidden characters stand out."""
    return Markup(HIDDEN.sub(_mark, str(escape(text))))


def _mark(match: re.Match[str]) -> str:
    return f'<span class="code">{code_of(match[0])}</span>'


def breakable(text: str) -> Markup:
    """A path or the name of a sweep's job as HTML that may be broken behind its signs, and not
    inside of words."""
    return Markup(_SIGN.sub(r"\g<0><wbr>", str(escape(visible(text)))))


@dataclass(frozen=True, slots=True)
class Span:
    """A part of a text that stands out."""

    start: int
    end: int  # behind its last character
    name: str


def shortened(text: str, limit: int | None, spans: Sequence[Span] = ()) -> Markup:
    """A text as HTML in which spans stand out.

    Args:
        limit: about how many characters are shown: the beginning, the end, and what surrounds the
            spans. The text says how much is left out. None shows all.
        spans: inside the text; they may overlap.
    """
    cuts = {0, len(text)} | {at for span in spans for at in (span.start, span.end)}
    parts, end_of_text = [], 0
    for start, end in kept(len(text), limit, spans):
        if start > end_of_text:
            parts.append(GAP.format(f"{start - end_of_text:,}"))
        inside = sorted(at for at in cuts if start < at < end)
        for left, right in zip([start, *inside], [*inside, end], strict=True):
            piece = marked(text[left:right])
            names = [span.name for span in spans if span.start <= left and right <= span.end]
            parts.append(SPAN.format(", ".join(names), piece) if names and piece else piece)
        end_of_text = end
    return join_html(parts)


def kept(length: int, limit: int | None, spans: Sequence[Span]) -> list[tuple[int, int]]:
    """The ranges of a text that are shown, in order and without overlaps."""
    if limit is None or length <= limit:
        return [(0, length)]
    edge, around = limit * 2 // 5, limit // 10
    wanted = [(0, edge), (length - edge, length)]
    for span in spans[:1]:
        end = min(span.end, span.start + around)  # a span can be all of the text
        wanted.append((max(span.start - around, 0), min(end + around, length)))
    ranges: list[tuple[int, int]] = []
    for start, end in sorted(wanted):
        if ranges and start <= ranges[-1][1]:
            ranges[-1] = ranges[-1][0], max(end, ranges[-1][1])
        else:
            ranges.append((start, end))
    return ranges


def join_html(parts: Iterable[str]) -> Markup:
    """Pieces of HTML one after the other; what is not HTML is escaped."""
    return Markup("").join(parts)


@cache
def templates(package: str) -> Environment:
    """The templates of a package. They escape every value, and an unknown name is an error."""
    from jinja2 import Environment, PackageLoader, StrictUndefined

    environment = Environment(
        loader=PackageLoader(package, "templates"),
        autoescape=True,
        undefined=StrictUndefined,
        finalize=_plain,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    environment.filters |= {
        "marked": marked,
        "breakable": breakable,
        "count": "{:,}".format,
        "query": urlencode,
    }
    return environment


def _plain(value: Any) -> Any:
    """What a template prints for a value: HTML stays, hidden characters of text become codes."""
    return visible(value) if isinstance(value, str) and not isinstance(value, Markup) else value
