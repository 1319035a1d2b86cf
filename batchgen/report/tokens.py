"""The tokens of a row as HTML: each is a span whose classes say what is known about it.

Which fact colours the tokens is chosen with radio inputs and CSS alone (`row.css`); a token's title
has all facts. Without scripts and without `style`, so that any Content-Security-Policy allows it.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import pyarrow as pa
from markupsafe import Markup, escape

from batchgen.report.safe_text import Span, visible

Decode = Callable[[list[int]], str]
"""The text of token ids, with special tokens."""

_HEAT = (0.05, 0.2, 0.5, 1.0, 2.0, 3.0, 5.0)
"""Bounds of the classes p0 to p7, in nats below certainty."""
_COLOURS = 6
"""How many colours tell steps and experts apart."""
_CACHED = 20_000  # texts of tokens
_MOST_TOP = 8  # of the likeliest tokens
_MOST_LAYERS = 4  # whose experts a title names


@dataclass(frozen=True, slots=True)
class Mode:
    """A way to colour tokens.

    Attributes:
        key: the letter of its classes in `row.css`.
        name: on the switch.
        legend: what the colours mean.
    """

    key: str
    name: str
    legend: str


_LOGPROB = Mode("p", "log-probability", "The redder, the less likely the token was.")
_DRAFT = Mode("d", "drafts", "Green tokens were drafts that held; the others are the model's own.")
_STEP = Mode("s", "steps", "Neighbours of one colour came from one forward.")
_EXPERTS = "The colour is that of the token's first expert; colours repeat."
_NONE = Mode("n", "none", "Titles tell what is known about a token.")


@dataclass(frozen=True)
class TokenView:
    """Makes the token views of the rows of one job.

    Args:
        schema: of its rows.
        decode: None shows ids in place of texts.
        step_name: what a value of `step_map` is called.
    """

    schema: pa.Schema
    decode: Decode | None
    step_name: str = "forward"

    def __post_init__(self) -> None:
        object.__setattr__(self, "_text", lru_cache(_CACHED)(self._decoded))

    def html(
        self,
        row: Mapping[str, Any],
        key: str,
        most: int | None = None,
        text: str | None = None,
        answer: Span | None = None,
    ) -> Markup:
        """The tokens of a row; empty if it has none.

        Args:
            row: all its columns; those with a value per token may be lists or arrays.
            key: makes the ids of inputs unique in the page: letters, digits and `-`.
            most: so many tokens are shown, from the beginning and the end; None shows all.
            text: of the row.
            answer: the part of the text that is the answer, whose tokens are underlined.
        """
        ids: Sequence[int] = () if row["token_ids"] is None else row["token_ids"]
        if not len(ids):
            return Markup("")
        facts = _Facts.of(row, self.schema, self.step_name)
        texts = self._texts(ids)
        inside = _inside(texts, text or "", answer)
        gap = (
            range(0) if most is None or len(ids) <= most else range(most // 2, len(ids) - most // 2)
        )
        parts: list[str] = []
        for place in range(len(ids)):
            if place in gap:
                if place == gap.start:
                    parts.append(_GAP.format(f"{len(gap):,}"))
                continue
            classes = ["t", *facts.classes(place), *["a"] * (place in inside)]
            title = self._title(int(ids[place]), place, facts)
            text = _shown(texts[place]) if texts else escape(f"{ids[place]} ")
            parts.append(f'<span class="{" ".join(classes)}" title="{escape(title)}">{text}</span>')
        return _VIEW.format(
            switches=_switches(facts.modes, key), tokens=Markup("").join(map(Markup, parts))
        )

    def _texts(self, ids: Sequence[int]) -> list[str]:
        """The text of each token; empty if it cannot be known."""
        return [] if self.decode is None else [self._token_text(int(id)) for id in ids]

    def _token_text(self, id: int) -> str:
        text: str = self._text(id)  # type: ignore[attr-defined]
        return text

    def _decoded(self, id: int) -> str:
        # Some tokenizers drop the space before the first token of a text, so the second one tells.
        assert self.decode is not None
        one, two = self.decode([id]), self.decode([id, id])
        return two[len(one) :] if two.startswith(one) else one

    def _title(self, id: int, place: int, facts: _Facts) -> str:
        lines = [self._name(id) if self.decode is not None else f"id {id}"]
        if facts.logprobs is not None:
            lines[0] += f"  {_logprob(facts.logprobs[place])}"
        lines += facts.lines(place)
        if facts.top is not None:
            lines += [
                f"{_logprob(value)}  {self._name(int(other))}"
                for other, value in facts.top(place)[:_MOST_TOP]
            ]
        return "\n".join(lines)

    def _name(self, id: int) -> str:
        if self.decode is None:
            return f"id {id}"
        return f"“{visible(self._token_text(id)).replace(chr(10), '↵')}” id {id}"


@dataclass(frozen=True)
class _Facts:
    """What is known about the tokens of one row. Each list has a value per token."""

    logprobs: Sequence[float | None] | None
    top: Callable[[int], list[tuple[int, float]]] | None
    steps: Sequence[int] | None
    drafts: Sequence[bool] | None
    experts: Sequence[Sequence[Sequence[int]] | None] | None
    layers: Sequence[int]
    step_name: str

    @staticmethod
    def of(row: Mapping[str, Any], schema: pa.Schema, step_name: str) -> _Facts:
        count = len(row["token_ids"])

        def column(name: str) -> Any:
            values = row.get(name)
            return values if values is not None and len(values) == count else None

        top, top_ids = column("top_logprobs"), column("top_logprob_ids")
        both = top is not None and top_ids is not None
        experts, layers = _experts(row, schema, count)
        return _Facts(
            column("logprobs"),
            (lambda at: list(zip(top_ids[at], top[at], strict=True))) if both else None,
            column("step_map"),
            column("draft_accepted"),
            experts,
            layers,
            step_name,
        )

    @property
    def modes(self) -> list[Mode]:
        found = [
            *[_LOGPROB] * (self.logprobs is not None),
            *[_STEP] * (self.steps is not None),
            *[_DRAFT] * (self.drafts is not None),
        ]
        found += [
            Mode(f"x{n}", f"experts of layer {self.layers[i]}", _EXPERTS)
            for n, i in enumerate(self._shown_layers)
        ]
        return [*found, _NONE]

    @property
    def _shown_layers(self) -> list[int]:
        """The places of the first, the middle and the last layer with experts."""
        count = len(self.layers)
        return sorted({0, count // 2, count - 1}) if self.experts is not None else []

    def classes(self, place: int) -> list[str]:
        found = []
        if self.logprobs is not None and (value := self.logprobs[place]) is not None:
            found.append(f"p{sum(-value > bound for bound in _HEAT)}")
        if self.steps is not None:
            found.append(f"s{self.steps[place] % _COLOURS}")
        if self.drafts is not None and self.drafts[place]:
            found.append("d1")
        if self.experts is not None and (mine := self.experts[place]) is not None:
            layers = enumerate(self._shown_layers)
            found += [f"x{n}-{mine[i][0] % _COLOURS}" for n, i in layers]
        return found

    def lines(self, place: int) -> list[str]:
        found = []
        if self.steps is not None:
            found.append(f"{self.step_name} {self.steps[place]}")
        if self.drafts is not None:
            found.append("a draft that held" if self.drafts[place] else "no draft")
        if self.experts is not None and (mine := self.experts[place]) is not None:
            every = max(len(self.layers) // _MOST_LAYERS, 1)
            for i in range(0, len(self.layers), every):
                found.append(f"layer {self.layers[i]}: experts {', '.join(map(str, mine[i]))}")
        return found


def _experts(
    row: Mapping[str, Any], schema: pa.Schema, count: int
) -> tuple[list[Any] | None, list[int]]:
    """The experts of each generated token (None for the last, which no forward has read), and the
    numbers of the layers that they are of."""
    values = row.get("routed_experts")
    if values is None or len(values) < max(count - 1, 1):
        return None, []
    metadata = schema.field("routed_experts").metadata or {}
    layers = json.loads(metadata.get(b"moe_layers", b"[]")) or list(range(len(values[0])))
    mine = [*values[len(values) - count + 1 :], None]
    return ([None] * (count - len(mine)) + mine, layers) if layers else (None, [])


def _inside(texts: Sequence[str], text: str, answer: Span | None) -> range:
    """The tokens of the answer, if the texts of tokens one after the other are that of the row."""
    if answer is None or not "".join(texts).startswith(text):
        return range(0)
    at, found = 0, []
    for place, text in enumerate(texts):
        if at < answer.end and at + len(text) > answer.start:
            found.append(place)
        at += len(text)
    return range(found[0], found[-1] + 1) if found else range(0)


def _shown(text: str) -> str:
    """A token in the page: a line break is seen and breaks the line."""
    if not text:
        return "∅"
    return str(escape(visible(text))).replace("\t", "⇥\t").replace("\n", "↵\n")


def _logprob(value: float | None) -> str:
    if value is None or math.isnan(value):
        return "–"
    share = 100 * math.exp(min(value, 0.0))
    return f"{value + 0.0:.3f} ({share:.3g}%)".replace("-0.000", "0.000").replace("-", "−")


_GAP = '<span class="gap"> … {} tokens left out … </span>'
_VIEW = Markup('<div class="tv">{switches}<div class="toks" dir="auto">{tokens}</div></div>')
_SWITCH = Markup(
    '<input type="radio" class="m m-{mode}" name="tv-{key}" id="tv-{key}-{mode}"{checked}>'
    '<label for="tv-{key}-{mode}">{name}</label>'
)
_LEGEND = Markup('<p class="legend l-{mode}">{text}</p>')


def _switches(modes: Sequence[Mode], key: str) -> Markup:
    if len(modes) == 1:
        return Markup("")
    first = Markup(" checked")
    switches = [
        _SWITCH.format(mode=mode.key, key=key, name=mode.name, checked="" if i else first)
        for i, mode in enumerate(modes)
    ]
    return Markup("").join(
        [*switches, *(_LEGEND.format(mode=mode.key, text=mode.legend) for mode in modes)]
    )
