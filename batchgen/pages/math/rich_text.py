"""Renders a text with Markdown and LaTeX as harmless HTML: without links, images and scripts. The
entry point is `rich_text`; the report and the viewer use it.

`"so *x* is $1$"` → `<p>so <em>x</em> is <math><mn>1</mn></math></p>`. Formulas, which Markdown must
not see, are replaced by placeholders before it is parsed, and filled in at the end.
"""

from __future__ import annotations

import re
from bisect import bisect_left
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import cache
from typing import TYPE_CHECKING

from markupsafe import Markup

from batchgen.pages.math.mathml import MOST_CHARACTERS, mathml
from batchgen.util.text.safe_text import GAP, SPAN, Span, marked, shown_ranges

if TYPE_CHECKING:
    from markdown_it import MarkdownIt
    from markdown_it.token import Token

MOST_RENDERED = 60_000
"""The maximum number of characters of a rendered text. A longer one is shown as its source."""
_OPEN, _CLOSE = "\ue000", "\ue001"
"""Delimiters around the number of a *piece*, a part of the text that Markdown must not see. If
these characters occur in the text itself, they become pieces, too."""
_PIECE = re.compile(f"{_OPEN}([0-9]+){_CLOSE}")
"""A piece in a text."""
_MARKS = re.compile(
    r"\\\\|\\[$()\[\]]|\$\$|\$|`+|\\boxed\{"
    r"|\\(?:begin|end)\{(?:align|aligned|equation|gather|multline|eqnarray)\*?\}"
    f"|[{_OPEN}{_CLOSE}]"
)
"""What begins or ends a formula or code, or is a delimiter of pieces."""
_BRACES = re.compile(r"\\.|[{}]", re.DOTALL)
"""A brace, or an escaped character, which is none."""
_WORDS = re.compile(r"[^\\{}$^_&]*[^\W\d_]{3}[^\\{}$^_&]*")
"""The content of a box that is text and no formula."""
_ENDS = {"\\(": "\\)", "\\[": "\\]", "$$": "$$", "$": "$"}
"""The closing delimiter of a formula, by the opening one."""
_TAGS = {
    "paragraph": "p", "bullet_list": "ul", "ordered_list": "ol", "list_item": "li",
    "blockquote": "blockquote", "em": "em", "strong": "strong", "table": "table", "thead": "thead",
    "tbody": "tbody", "tr": "tr", "th": "th", "td": "td", "heading": "h5",
}  # fmt: skip
"""The HTML element of each kind of Markdown token."""
ELEMENTS = frozenset(_TAGS.values()) | {"hr", "br", "pre", "code", "span", "mark"}
"""All HTML elements that occur outside of formulas."""


@dataclass
class _Pieces:
    """The pieces of a text: the source and the HTML of each."""

    sources: list[str] = field(default_factory=list)
    htmls: list[Markup] = field(default_factory=list)

    def add(self, source: str, html: Markup) -> str:
        """Add a piece, and return its placeholder."""
        self.sources.append(source)
        self.htmls.append(html)
        return f"{_OPEN}{len(self.htmls) - 1}{_CLOSE}"

    def html(self, text: str) -> Markup:
        """Return a text as HTML, with its placeholders replaced by the HTML of the pieces."""
        pieces = _PIECE.split(text)
        return Markup("").join(
            self.htmls[int(part)] if i % 2 else marked(part) for i, part in enumerate(pieces)
        )

    def source(self, text: str) -> str:
        """Return a text with its placeholders replaced by the sources of the pieces."""
        return _PIECE.sub(lambda match: self.sources[int(match[1])], text)


def rich_text(text: str, limit: int | None = None, spans: Sequence[Span] = ()) -> Markup | None:
    """Return a text with its Markdown and its formulas rendered; None if it has neither, or is too
    long.

    Links and images are shown as their source, HTML is shown as text, and hidden characters are
    named.

    Args:
        limit, spans: as for `safe_text.shortened`.
    """
    ranges = shown_ranges(len(text), limit, spans)
    if sum(end - start for start, end in ranges) > MOST_RENDERED:
        return None
    parts, is_rich, end_of_text = [], False, 0
    for start, end in ranges:
        if start > end_of_text:
            parts.append(GAP.format(f"{start - end_of_text:,}"))
        inside = [
            Span(span.start - start, span.end - start, span.name)
            for span in spans
            if start <= span.start and span.end <= end
        ]
        html, rich = _render(text[start:end], inside)
        parts.append(html)
        is_rich |= rich
        end_of_text = end
    return Markup("").join(parts) if is_rich else None


def formulas(text: str) -> list[tuple[int, int, str, bool]]:
    """Find the formulas of a text: the start, the end and the source of each, and whether it is on
    a line of its own.

    A formula is between LaTeX delimiters, between `$` (unless these look like prices), or in a box.
    """
    marks = [match for match in _MARKS.finditer(text) if match[0] != "\\\\"]
    closing_braces = _closing_braces(text) if "\\boxed{" in text else {}
    offsets: dict[str, list[int]] = {}
    for i, match in enumerate(marks):
        offsets.setdefault(match[0], []).append(i)
    spans, i = [], 0
    while i < len(marks):
        opening = marks[i]
        kind = opening[0]
        if kind == "\\boxed{":
            end_at = closing_braces.get(opening.end() - 1)
            inside = "" if end_at is None else text[opening.end() : end_at]
            if end_at is None or not _is_formula(kind, inside, ""):
                i += 1
                continue
            inside = f"\\text{{{inside}}}" if _WORDS.fullmatch(inside) else inside
            spans.append((opening.start(), end_at + 1, f"{kind}{inside}}}", False))
            while i < len(marks) and marks[i].start() <= end_at:
                i += 1
            continue
        is_environment = kind.startswith("\\begin")
        end = kind.replace("begin", "end") if is_environment else _ENDS.get(kind)
        if kind.startswith("`"):  # code
            end = kind
        at = _after(offsets.get(end or "", []), i)
        if end is None or at is None:
            i += 1
            continue
        closing = marks[at]
        inside = text[opening.end() : closing.start()]
        if kind.startswith("`"):
            i = at + 1
            continue
        if not _is_formula(kind, inside, text[closing.end() : closing.end() + 1]):
            i += 1
            continue
        source = text[opening.start() : closing.end()] if is_environment else inside
        spans.append((opening.start(), closing.end(), source, kind not in ("$", "\\(")))
        i = at + 1
    return spans


def _closing_braces(text: str) -> dict[int, int]:
    """Return the position of each closing brace, by the position of the brace that it closes."""
    closing: dict[int, int] = {}
    opened: list[int] = []
    for match in _BRACES.finditer(text):
        if match[0] == "{":
            opened.append(match.start())
        elif match[0] == "}" and opened:
            closing[opened.pop()] = match.start()
    return closing


def _after(offsets: Sequence[int], i: int) -> int | None:
    """Return the first of the ascending `offsets` that is greater than `i`; None if there is
    none."""
    at = bisect_left(offsets, i + 1)
    return offsets[at] if at < len(offsets) else None


def _is_formula(kind: str, inside: str, after: str) -> bool:
    """Return whether the text between delimiters of a kind is a formula. `after` is the character
    after the closing delimiter."""
    if len(inside) > MOST_CHARACTERS or not inside.strip() or "\n\n" in inside:
        return False
    return kind != "$" or not (inside[0].isspace() or inside[-1].isspace() or after.isdecimal())


def _render(text: str, spans: Sequence[Span]) -> tuple[Markup, bool]:
    """Return a text as HTML, and whether something in it was rendered."""
    pieces, parts, at, is_rich = _Pieces(), [], 0, False
    for start, end, html in _replaced(text, spans):
        parts += [text[at:start], pieces.add(text[start:end], html)]
        at = end
        is_rich |= "<math" in html
    parts.append(text[at:])
    tokens = _markdown().parse("".join(parts))
    html, rich = _html(tokens, pieces)
    return html, rich or is_rich


def _replaced(text: str, spans: Sequence[Span]) -> list[tuple[int, int, Markup]]:
    """Return the pieces of a text, in order and without overlaps: the start, the end and the HTML
    of each."""
    replaced: list[tuple[int, int, Markup]] = []
    for start, end, source, display in formulas(text):
        html = mathml(source.strip(), display=display)
        names = ", ".join(span.name for span in spans if start <= span.start and span.end <= end)
        replaced.append((start, end, SPAN.format(names, html) if names else html))
    replaced += [
        (m.start(), m.end(), marked(m[0])) for m in re.finditer(f"[{_OPEN}{_CLOSE}]", text)
    ]
    for span in spans:
        inside = text[span.start : span.end]
        if "\n" not in inside and "`" not in inside:
            replaced.append((span.start, span.end, SPAN.format(span.name, marked(inside))))
    apart: list[tuple[int, int, Markup]] = []
    last_end = 0
    for start, end, html in sorted(replaced, key=lambda piece: piece[:2]):
        if start >= last_end:
            apart.append((start, end, html))
            last_end = end
    return apart


@cache
def _markdown() -> MarkdownIt:
    from markdown_it import MarkdownIt

    # Syntax that could refer to anything outside the page is disabled: links, images, HTML.
    disabled = ["link", "image", "autolink", "html_inline", "html_block", "reference", "entity"]
    return MarkdownIt("commonmark", {"html": False}).enable("table").disable(disabled)


def _html(tokens: Sequence[Token], pieces: _Pieces) -> tuple[Markup, bool]:
    """Return Markdown tokens as HTML, and whether they are more than paragraphs."""
    parts: list[str] = []
    is_rich = False
    for token in tokens:
        kind, _, side = token.type.rpartition("_")
        if side in ("open", "close") and kind in _TAGS:
            if not token.hidden:
                parts.append(f"<{'/' * (side == 'close')}{_TAGS[kind]}>")
            is_rich |= kind != "paragraph"
        elif token.type == "inline":
            html, rich = _html(token.children or [], pieces)
            parts.append(html)
            is_rich |= rich
        elif token.type in ("fence", "code_block"):
            parts.append(f"<pre>{marked(pieces.source(token.content))}</pre>")
            is_rich = True
        elif token.type == "code_inline":
            parts.append(f"<code>{marked(pieces.source(token.content))}</code>")
            is_rich = True
        elif token.type in ("softbreak", "hardbreak"):
            parts.append("<br>")
        elif token.type == "hr":
            parts.append("<hr>")
            is_rich = True
        else:
            parts.append(pieces.html(token.content))
    return Markup("".join(parts)), is_rich
