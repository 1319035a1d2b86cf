"""Renders the tokens of a row as a row of boxes, HTML spans, whose colours and tooltips show facts
about each token: its probability, the step that wrote it, its experts.

Radio inputs and `row.css` choose which fact colours the tokens, without scripts or `style`
attributes, so that any Content-Security-Policy allows it.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property, lru_cache
from typing import Any

import pyarrow as pa
from markupsafe import Markup, escape

from batchgen.pages.tokens.token_row import Mode, TokenRow
from batchgen.util.hidden import visible
from batchgen.util.text.safe_text import Span

Decode = Callable[[list[int]], str]
"""Turns token ids into text, with special tokens."""
_CACHED = 20_000
"""The number of tokens, and of log-probabilities, whose texts are kept in memory."""
_MOST_TOP = 8
"""The number of likeliest tokens that a tooltip lists."""


class TokenView:
    """Makes the token views of the rows of one job.

    Args:
        schema: the columns of its rows.
        decode: turns token ids into text; with None the ids are shown.
        step_name: what a step that generates tokens is called, such as `forward`.
    """

    def __init__(
        self, schema: pa.Schema, decode: Decode | None, step_name: str = "forward"
    ) -> None:
        self._schema, self._decode, self._step_name = schema, decode, step_name
        self.has_texts = decode is not None
        self.text = lru_cache(_CACHED)(self._text)
        self.name = lru_cache(_CACHED)(self._name)

    def of(
        self, row: Mapping[str, Any], key: str, text: str | None, answer: Span | None
    ) -> RowTokens:
        """Return the view of a row.

        Args:
            row: the values of its columns; those with a value per token may be lists or arrays.
            key: makes the HTML ids of inputs unique in the page: letters, digits and `-`.
            text: the row's text, or None.
            answer: the part of the text whose tokens are underlined, or None.
        """
        ids: Sequence[int] = () if (token_ids := row.get("token_ids")) is None else token_ids
        facts = TokenRow.of(row, len(ids), self._schema, self._step_name)
        return RowTokens(
            view=self,
            ids=[int(id) for id in ids],
            facts=facts,
            key=key,
            text=text or "",
            answer=answer,
        )

    def _text(self, id: int) -> str | None:
        """Return the text of a token; None without a tokenizer."""
        if self._decode is None:
            return None
        # Some tokenizers drop the space before the first token of a text, not before the second.
        one, two = self._decode([id]), self._decode([id, id])
        return two[len(one) :] if two.startswith(one) else one

    def _name(self, id: int) -> Markup:
        """Return the text and the id of a token, for a tooltip."""
        text: str | None = self.text(id)
        quoted = "" if text is None else f"“{visible(text).replace(chr(10), '↵')}” "
        return escape(f"{quoted}id {id}")


@dataclass(frozen=True)
class RowTokens:
    """The token view of one row.

    Attributes:
        ids: the token ids of the row.
        facts: the facts about these tokens.
        key, text, answer: see `TokenView.of`.
    """

    view: TokenView
    ids: Sequence[int]
    facts: TokenRow
    key: str
    text: str
    answer: Span | None
    _html: dict[int, str] = field(default_factory=dict)

    def html(self, limit: int | None = None) -> Markup:
        """Return the view. Of more than `limit` tokens, half of `limit` are shown from the start
        and half from the end. The view is empty if there are no tokens or the limit is 0."""
        count = len(self.ids)
        if not count or limit == 0:
            return Markup("")
        half = count if limit is None or count <= limit else limit // 2
        parts = [self._span(index) for index in range(half)]
        if half < count:
            parts.append(_GAP.format(f"{count - 2 * half:,}"))
            parts += [self._span(index) for index in range(count - half, count)]
        switches = _switches(self.facts.modes, self.key)
        if self._inside:
            switches += _ANSWER
        return _VIEW.format(switches=switches + self._film, tokens=Markup("".join(parts)))

    @property
    def _film(self) -> Markup:
        """A slider through the steps, which stays hidden without the script of `batchgen view`."""
        if self.facts.steps is None or not len(self.facts.steps):
            return Markup("")
        last = max(self.facts.steps)
        return _FILM.format(key=self.key, name=self.facts.step_name, last=last)

    def _span(self, index: int) -> str:
        """Return the box of a token; boxes are kept for views with other limits."""
        if (html := self._html.get(index)) is None:
            id = self.ids[index]
            text: str | None = self.view.text(id)
            answer = " a" if index in self._inside else ""
            classes = f"t{self.facts.classes(index)}{answer}"
            label = f"{id} " if text is None else _shown(text)
            step = "" if self.facts.steps is None else f" data-s={self.facts.steps[index]}"
            title = self._title(index)
            html = f'<span class="{classes}" tabindex=0{step} title="{title}">{label}</span>'
            self._html[index] = html
        return html

    def _title(self, index: int) -> str:
        """Return the tooltip of a token, as lines of HTML text."""
        facts, name = self.facts, self.view.name
        lines: list[str] = [name(self.ids[index])]
        if facts.logprobs is not None:
            lines[0] += f"  {_logprob(facts.logprobs[index])}"
        lines += facts.lines(index)
        for step, old in facts.replaced.get(index, ()):
            lines.append(f"{facts.step_name} {step} replaced {name(old)}")
        if facts.top is not None:
            lines += [f"{_logprob(v)}  {name(id)}" for id, v in facts.top(index)[:_MOST_TOP]]
        return "\n".join(lines)

    @cached_property
    def _inside(self) -> range:
        """The indices of the answer's tokens. The range is empty if the texts of the tokens do not
        add up to the row's text: then it is unknown which tokens these are."""
        if self.answer is None or not self.view.has_texts:
            return range(0)
        texts = [self.view.text(id) or "" for id in self.ids]
        if not "".join(texts).startswith(self.text):
            return range(0)
        start, indices = 0, []
        for index, text in enumerate(texts):
            if start < self.answer.end and start + len(text) > self.answer.start:
                indices.append(index)
            start += len(text)
        return range(indices[0], indices[-1] + 1) if indices else range(0)


def _shown(text: str) -> str:
    """Return a token's text for its box. A line break is shown as ↵ and also breaks the line."""
    if not text:
        return "∅"
    return str(escape(visible(text))).replace("\t", "⇥\t").replace("\n", "↵\n")


def _logprob(value: float | None) -> str:
    """Return a log-probability and, in brackets, the probability."""
    if value is None or math.isnan(value):
        return "–"
    return _logprob_text(round(float(value), 3))


@lru_cache(_CACHED)
def _logprob_text(value: float) -> str:
    share = 100 * math.exp(min(value, 0.0))
    return f"{'−' if value < 0 else ''}{abs(value):.3f} ({share:.3g}%)"


_GAP = '<span class="gap"> … {} tokens left out … </span>'
_VIEW = Markup('<div class="tv">{switches}<div class="toks" dir="auto">{tokens}</div></div>')
_FILM = Markup(
    '<p class="film" hidden><label for="tv-{key}-film">After {name}</label>'
    '<input type="range" id="tv-{key}-film" min="0" max="{last}" value="{last}">'
    '<output for="tv-{key}-film">{last} of {last}</output></p>'
)
_SWITCH = Markup(
    '<input type="radio" class="m m-{mode}" name="tv-{key}" id="tv-{key}-{mode}"{checked}>'
    '<label for="tv-{key}-{mode}">{name}</label>'
)
_ANSWER = Markup('<p class="underlined">Underlined: <span class="t a">the answer</span></p>')
_LEGEND = Markup('<p class="legend l-{mode}">{text}</p>')


def _switches(modes: Sequence[Mode], key: str) -> Markup:
    """Return radio buttons that choose what colours show, and the legend of each choice."""
    if len(modes) == 1:
        return Markup("")
    first = Markup(" checked")
    switches = [
        _SWITCH.format(mode=mode.key, key=key, name=mode.name, checked="" if index else first)
        for index, mode in enumerate(modes)
    ]
    return Markup("").join(
        [*switches, *(_LEGEND.format(mode=mode.key, text=mode.legend) for mode in modes)]
    )
