"""Converts texts of models and data sets to safe HTML: escaped, with hidden characters shown as
codes.

Any text in a page may try to deceive the reader. Templates therefore escape every value. Control
characters, direction marks and characters without width are shown as their codes.
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
"""Matches the signs after which a path or name may be broken."""
SPAN = Markup('<mark title="{}">{}</mark>')


def marked(text: str) -> Markup:
    """Return the text as HTML, with highlighted codes for hidden characters."""
    return Markup(HIDDEN.sub(_mark, str(escape(text))))


def _mark(match: re.Match[str]) -> str:
    return f'<span class="code">{code_of(match[0])}</span>'


def breakable(text: str) -> Markup:
    """Return a path or the name of a sweep's job as HTML. A line may be broken after its signs, but
    not inside words."""
    return Markup(_SIGN.sub(r"\g<0><wbr>", str(escape(visible(text)))))


@dataclass(frozen=True, slots=True)
class Span:
    """A part of a text that is highlighted."""

    start: int
    end: int  # exclusive
    name: str  # shown as a tooltip


def shortened(text: str, limit: int | None, spans: Sequence[Span] = ()) -> Markup:
    """Return a text as HTML in which spans are highlighted.

    Args:
        limit: roughly how many characters are shown: the beginning, the end, and the surroundings
            of the first span. The HTML says how much is left out. None shows everything.
        spans: the spans, which may overlap.
    """
    cuts = {0, len(text)} | {at for span in spans for at in (span.start, span.end)}
    parts, end_of_text = [], 0
    for start, end in shown_ranges(len(text), limit, spans):
        if start > end_of_text:
            parts.append(GAP.format(f"{start - end_of_text:,}"))
        inside = sorted(at for at in cuts if start < at < end)
        for left, right in zip([start, *inside], [*inside, end], strict=True):
            piece = marked(text[left:right])
            names = [span.name for span in spans if span.start <= left and right <= span.end]
            parts.append(SPAN.format(", ".join(names), piece) if names and piece else piece)
        end_of_text = end
    return join_html(parts)


def shown_ranges(length: int, limit: int | None, spans: Sequence[Span]) -> list[tuple[int, int]]:
    """Return the ranges of a text that are shown, in order and without overlaps."""
    if limit is None or length <= limit:
        return [(0, length)]
    # Of the limit, two fifths at each end, and a tenth before and after the first span.
    edge, around = limit * 2 // 5, limit // 10
    wanted = [(0, edge), (length - edge, length)]
    for span in spans[:1]:
        end = min(span.end, span.start + around)  # a span can be as long as the text
        wanted.append((max(span.start - around, 0), min(end + around, length)))
    ranges: list[tuple[int, int]] = []
    for start, end in sorted(wanted):
        if ranges and start <= ranges[-1][1]:
            ranges[-1] = ranges[-1][0], max(end, ranges[-1][1])
        else:
            ranges.append((start, end))
    return ranges


def join_html(parts: Iterable[str]) -> Markup:
    """Concatenate pieces of HTML. Pieces that are not Markup are escaped."""
    return Markup("").join(parts)


@cache
def templates(package: str) -> Environment:
    """Return the templates of a package. They escape every value, and an unknown name is an
    error."""
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
    """Return the form in which a template prints a value: HTML unchanged, hidden characters of
    texts as codes."""
    return visible(value) if isinstance(value, str) and not isinstance(value, Markup) else value
