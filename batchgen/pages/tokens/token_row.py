"""The facts about the tokens of one row, and the ways to colour tokens by them."""

from __future__ import annotations

import json
import math
from bisect import bisect_left
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import pyarrow as pa
from markupsafe import Markup

_HEAT = (0.05, 0.2, 0.5, 1.0, 2.0, 3.0, 5.0)
"""Bounds of the classes p0 to p7, in nats below certainty."""
_COLOURS = 6
"""How many colours tell steps and experts apart."""
_MOST_NUMBERS = 3  # of a colour that its legend names
_MOST_LAYERS = 4  # whose experts a title names


@dataclass(frozen=True, slots=True)
class Mode:
    """A way to colour tokens."""

    key: str  # the letter of its classes in `row.css`
    name: str  # on the switch
    legend: str


def _heat_legend() -> Markup:
    """A sample of each colour of _HEAT with the probabilities that it stands for."""
    shares = [f"{100 * math.exp(-bound):.2g}%" for bound in _HEAT]
    names = [f"over {shares[0]}", *(f"to {share}" for share in shares[1:]), "less"]
    keys = (_KEY.format(f"p{i}", name) for i, name in enumerate(names))
    return Markup("How likely the token was: ") + Markup(" ").join(keys)


def _cycle_legend(title: str, prefix: str, values: Sequence[int]) -> Markup:
    """A sample of each colour that tokens have, with the values that it stands for: colours
    repeat."""
    keys, different = [], sorted(set(values))
    for colour in range(_COLOURS):
        mine = [value for value in different if value % _COLOURS == colour]
        names = ", ".join(map(str, mine[:_MOST_NUMBERS]))
        if mine:
            more = " …" * (len(mine) > _MOST_NUMBERS)
            keys.append(_KEY.format(f"{prefix}{colour}", names + more))
    return Markup("{} ").format(title) + Markup(" ").join(keys)


_KEY = Markup('<span class="key {}">{}</span>')
_LOGPROB = Mode("p", "log-probability", _heat_legend())
_DRAFT = Mode(
    "d", "drafts", _KEY.format("d1", "an accepted draft") + " The others are the model's own."
)
_NONE = Mode("n", "none", "No colours.")


@dataclass(frozen=True)
class TokenRow:
    """What is known about the tokens of one row. Each list has a value per token."""

    logprobs: Sequence[float | None] | None
    top: Callable[[int], list[tuple[int, float]]] | None
    steps: Sequence[int] | None
    drafts: Sequence[bool] | None
    experts: Sequence[Sequence[Sequence[int]] | None] | None
    layers: Sequence[int]
    step_name: str
    # What stood in the place of a token before: the step that replaced it and its id, by place.
    replaced: Mapping[int, Sequence[tuple[int, int]]]

    @staticmethod
    def of(row: Mapping[str, Any], count: int, schema: pa.Schema, step_name: str) -> TokenRow:
        """The facts of a row of `count` tokens."""

        def column(name: str) -> Any:
            values = row.get(name)
            return values if values is not None and len(values) == count else None

        top, top_ids = column("top_logprobs"), column("top_logprob_ids")
        both = top is not None and top_ids is not None
        experts, layers = _experts(row, schema, count)
        return TokenRow(
            column("logprobs"),
            (lambda at: _pairs(top_ids[at], top[at])) if both else None,
            column("step_map"),
            column("draft_accepted"),
            experts,
            layers,
            step_name,
            _replaced(row),
        )

    @property
    def modes(self) -> list[Mode]:
        modes = [_LOGPROB] * (self.logprobs is not None)
        if self.steps is not None:
            legend = _cycle_legend(f"The {self.step_name} that wrote the token:", "s", self.steps)
            modes.append(Mode("s", "steps", legend))
        modes += [_DRAFT] * (self.drafts is not None)
        for n, i in enumerate(self._shown_layers):
            first = [mine[i][0] for mine in self.experts or () if mine is not None]
            legend = _cycle_legend("The token's first expert:", f"x{n}-", first)
            modes.append(Mode(f"x{n}", f"experts of layer {self.layers[i]}", legend))
        return [*modes, _NONE]

    @property
    def _shown_layers(self) -> list[int]:
        """The places of the first, the middle and the last layer with experts."""
        count = len(self.layers)
        return sorted({0, count // 2, count - 1}) if self.experts is not None else []

    def classes(self, index: int) -> str:
        """The classes of a token, with a space before each."""
        names = ""
        if self.logprobs is not None and (value := self.logprobs[index]) is not None:
            names += f" p{bisect_left(_HEAT, -value)}"
        if self.steps is not None:
            names += f" s{self.steps[index] % _COLOURS}"
        if index in self.replaced:
            names += " e"
        if self.drafts is not None and self.drafts[index]:
            names += " d1"
        if self.experts is not None and (mine := self.experts[index]) is not None:
            for n, i in enumerate(self._shown_layers):
                names += f" x{n}-{mine[i][0] % _COLOURS}"
        return names

    def lines(self, index: int) -> list[str]:
        """What the title of a token says besides its log-probability, as HTML."""
        lines = []
        if self.steps is not None:
            lines.append(f"{self.step_name} {self.steps[index]}")
        if self.drafts is not None:
            lines.append("an accepted draft" if self.drafts[index] else "no draft")
        if self.experts is not None and (mine := self.experts[index]) is not None:
            every = max(len(self.layers) // _MOST_LAYERS, 1)
            for i in range(0, len(self.layers), every):
                lines.append(f"layer {self.layers[i]}: experts {', '.join(map(str, mine[i]))}")
        return lines


def _replaced(row: Mapping[str, Any]) -> dict[int, list[tuple[int, int]]]:
    """The tokens that others have replaced, by their places, from the column `edit_log`."""
    spans: dict[int, list[tuple[int, int]]] = {}
    log = row.get("edit_log")
    for index, step, old, _ in () if log is None else log:
        spans.setdefault(int(index), []).append((int(step), int(old)))
    return spans


def _experts(
    row: Mapping[str, Any], schema: pa.Schema, count: int
) -> tuple[list[Any] | None, list[int]]:
    """The experts of each generated token (None for the last, which no forward has read), and the
    numbers of their layers."""
    values = row.get("routed_experts")
    if values is None or len(values) < max(count - 1, 1):
        return None, []
    layers = moe_layers(schema) or list(range(len(values[0])))
    mine = [*values[len(values) - count + 1 :], None]
    return ([None] * (count - len(mine)) + mine, layers) if layers else (None, [])


def moe_layers(schema: pa.Schema) -> list[int]:
    """The numbers of the layers that `routed_experts` tells of; empty if it does not say them."""
    metadata = schema.field("routed_experts").metadata or {}
    layers: list[int] = json.loads(metadata.get(b"moe_layers", b"[]"))
    return layers


def _pairs(ids: Sequence[int], values: Sequence[float]) -> list[tuple[int, float]]:
    return [(int(id), float(value)) for id, value in zip(ids, values, strict=True)]
