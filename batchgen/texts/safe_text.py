"""Text of models and data sets in HTML: escaped, and without characters that one does not see.

All text in a report comes from somewhere else, and may be made to deceive. So the templates escape
every value, and `visible` names the characters that change how others look: controls, marks of
writing direction, and what has no width at all.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import cache
from typing import TYPE_CHECKING, Any

from markupsafe import Markup, escape

from batchgen.util.hidden import HIDDEN, code_of, visible

if TYPE_CHECKING:
    from jinja2 import Environment


def marked(text: str) -> Markup:
    """The text as HTML, in which codes of hidden characters stand out."""
    return Markup(HIDDEN.sub(_mark, str(escape(text))))


def _mark(match: re.Match[str]) -> str:
    return f'<span class="code">{code_of(match[0])}</span>'


def plain(value: Any) -> Any:
    """What a template prints for a value: HTML stays, text becomes `visible`."""
    if isinstance(value, Markup):
        return value
    return visible(value) if isinstance(value, str) else value


@dataclass(frozen=True, slots=True)
class Span:
    """A part of a text that stands out.

    Attributes:
        start: of its first character.
        end: behind its last character.
        name: what it is.
    """

    start: int
    end: int
    name: str


def shortened(text: str, most: int | None, spans: Sequence[Span] = ()) -> Markup:
    """A text as HTML in which spans stand out.

    Args:
        most: about so many characters are shown: the beginning, the end, and what surrounds the
            spans. Where something is left out, the text says how much. None shows all.
        spans: inside the text; they may overlap.
    """
    ranges = kept(len(text), most, spans)
    cuts = {0, len(text)} | {at for span in spans for at in (span.start, span.end)}
    parts, shown = [], 0
    for start, end in ranges:
        if start > shown:
            parts.append(GAP.format(f"{start - shown:,}"))
        inside = sorted(at for at in cuts if start < at < end)
        for left, right in zip([start, *inside], [*inside, end], strict=True):
            piece = marked(text[left:right])
            names = [span.name for span in spans if span.start <= left and right <= span.end]
            parts.append(SPAN.format(", ".join(names), piece) if names and piece else piece)
        shown = end
    return Markup("").join(parts)


GAP = Markup(' <span class="gap">… {} characters left out …</span> ')
SPAN = Markup('<mark title="{}">{}</mark>')


def kept(length: int, most: int | None, spans: Sequence[Span]) -> list[tuple[int, int]]:
    """The ranges of a text that are shown, in order and apart from each other."""
    if most is None or length <= most:
        return [(0, length)]
    edge, around = most * 2 // 5, most // 10
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


@cache
def environment() -> Environment:
    """The templates of reports. They escape every value, and an unknown name is an error."""
    from jinja2 import Environment, PackageLoader, StrictUndefined

    made = Environment(
        loader=PackageLoader("batchgen.report", "templates"),
        autoescape=True,
        undefined=StrictUndefined,
        finalize=plain,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    made.filters |= {"marked": marked, "count": _count}
    return made


def _count(number: float) -> str:
    return f"{number:,}"


def join(parts: Iterable[str]) -> Markup:
    """Pieces of HTML one after the other; what is not HTML is escaped."""
    return Markup("").join(parts)
