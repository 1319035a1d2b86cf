"""The facts about the tokens of one row, and the modes in which their colours show these facts.

`row.css` has the colours of CSS classes: p0 to p7 for probabilities, s0 to s5 for steps, d1 for
drafts, x0-0 to x2-5 for experts, e for tokens that replaced another one.
"""

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
"""The upper bounds of the classes p0 to p6 for −log(probability); p7 is above the last."""
_COLOURS = 6
"""The number of colours for steps and for experts; number n has colour n mod 6."""
_MOST_NUMBERS = 3
"""How many numbers of each colour a legend names."""
_MOST_LAYERS = 4
"""About how many layers a tooltip names the experts of."""


@dataclass(frozen=True, slots=True)
class Mode:
    """A choice of what the colours of tokens show.

    Attributes:
        key: the first letter of its CSS classes.
        name: the text of its radio button.
        legend: the text that explains the colours, as HTML.
    """

    key: str
    name: str
    legend: str


def _heat_legend() -> Markup:
    """Return a sample of each colour for probabilities, with the probabilities it stands for."""
    shares = [f"{100 * math.exp(-bound):.2g}%" for bound in _HEAT]
    names = [f"over {shares[0]}", *(f"to {share}" for share in shares[1:]), "less"]
    keys = (_KEY.format(f"p{i}", name) for i, name in enumerate(names))
    return Markup("How likely the token was: ") + Markup(" ").join(keys)


def _cycle_legend(title: str, prefix: str, values: Sequence[int]) -> Markup:
    """Return a sample of each colour that the values have, with the first values it stands for."""
    keys, different = [], sorted(set(values))
    for colour in range(_COLOURS):
        same_colour = [value for value in different if value % _COLOURS == colour]
        names = ", ".join(map(str, same_colour[:_MOST_NUMBERS]))
        if same_colour:
            more = " …" * (len(same_colour) > _MOST_NUMBERS)
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
    """The facts about the N tokens of one row. A fact that is not known is None.

    Attributes:
        logprobs: [N], the log-probability of each token.
        top: returns the likeliest tokens at an index, as pairs of token id and log-probability.
        steps: [N], the number of the step that wrote each token.
        drafts: [N], whether each token is an accepted draft token.
        experts: [N, layers, experts per token], the ids of the experts that each token used, the
            one with the largest weight first; None for a token that no forward has read.
        layers: the numbers of the layers that have experts.
        step_name: what a step is called, such as `forward`.
        replaced: by the index of a token, the tokens at this place before it: for each the step
            that replaced it, and its token id.
    """

    logprobs: Sequence[float | None] | None
    top: Callable[[int], list[tuple[int, float]]] | None
    steps: Sequence[int] | None
    drafts: Sequence[bool] | None
    experts: Sequence[Sequence[Sequence[int]] | None] | None
    layers: Sequence[int]
    step_name: str
    replaced: Mapping[int, Sequence[tuple[int, int]]]

    @staticmethod
    def of(row: Mapping[str, Any], count: int, schema: pa.Schema, step_name: str) -> TokenRow:
        """Collect the facts about a row of `count` tokens from its columns."""

        def column(name: str) -> Any:
            values = row.get(name)
            return values if values is not None and len(values) == count else None

        top, top_ids = column("top_logprobs"), column("top_logprob_ids")
        both = top is not None and top_ids is not None
        experts, layers = _experts(row, schema, count)
        return TokenRow(
            logprobs=column("logprobs"),
            top=(lambda index: _pairs(top_ids[index], top[index])) if both else None,
            steps=column("step_map"),
            drafts=column("draft_accepted"),
            experts=experts,
            layers=layers,
            step_name=step_name,
            replaced=_replaced(row),
        )

    @property
    def modes(self) -> list[Mode]:
        """The modes for which the facts are known; the last one shows no colours."""
        modes = [_LOGPROB] * (self.logprobs is not None)
        if self.steps is not None:
            legend = _cycle_legend(f"The {self.step_name} that wrote the token:", "s", self.steps)
            modes.append(Mode("s", "steps", legend))
        modes += [_DRAFT] * (self.drafts is not None)
        for number, layer in enumerate(self._shown_layers):
            first = [ids[layer][0] for ids in self.experts or () if ids is not None]
            legend = _cycle_legend("The token's first expert:", f"x{number}-", first)
            modes.append(Mode(f"x{number}", f"experts of layer {self.layers[layer]}", legend))
        return [*modes, _NONE]

    @property
    def _shown_layers(self) -> list[int]:
        """The places in `layers` of the first, the middle and the last layer, which have a mode."""
        count = len(self.layers)
        return sorted({0, count // 2, count - 1}) if self.experts is not None else []

    def classes(self, index: int) -> str:
        """Return the CSS classes of a token, with a space before each."""
        names = ""
        if self.logprobs is not None and (value := self.logprobs[index]) is not None:
            names += f" p{bisect_left(_HEAT, -value)}"
        if self.steps is not None:
            names += f" s{self.steps[index] % _COLOURS}"
        if index in self.replaced:
            names += " e"
        if self.drafts is not None and self.drafts[index]:
            names += " d1"
        if self.experts is not None and (ids := self.experts[index]) is not None:
            for number, layer in enumerate(self._shown_layers):
                names += f" x{number}-{ids[layer][0] % _COLOURS}"
        return names

    def lines(self, index: int) -> list[str]:
        """Return the lines of a token's tooltip about its step, its draft and its experts."""
        lines = []
        if self.steps is not None:
            lines.append(f"{self.step_name} {self.steps[index]}")
        if self.drafts is not None:
            lines.append("an accepted draft" if self.drafts[index] else "no draft")
        if self.experts is not None and (ids := self.experts[index]) is not None:
            every = max(len(self.layers) // _MOST_LAYERS, 1)
            for layer in range(0, len(self.layers), every):
                names = ", ".join(map(str, ids[layer]))
                lines.append(f"layer {self.layers[layer]}: experts {names}")
        return lines


def _replaced(row: Mapping[str, Any]) -> dict[int, list[tuple[int, int]]]:
    """Return `TokenRow.replaced` from the column `edit_log`, whose entries are (index, step, old
    token id, new token id)."""
    replaced: dict[int, list[tuple[int, int]]] = {}
    log = row.get("edit_log")
    for index, step, old, _ in () if log is None else log:
        replaced.setdefault(int(index), []).append((int(step), int(old)))
    return replaced


def _experts(
    row: Mapping[str, Any], schema: pa.Schema, count: int
) -> tuple[list[Any] | None, list[int]]:
    """Return `TokenRow.experts` and `TokenRow.layers`.

    The column has an entry for each token that a forward has read, prompt tokens first. The last
    generated token is not read, so the last count - 1 entries are those of generated tokens.
    """
    values = row.get("routed_experts")
    if values is None or len(values) < max(count - 1, 1):
        return None, []
    layers = moe_layers(schema) or list(range(len(values[0])))
    if not layers:
        return None, []
    experts = [*values[len(values) - count + 1 :], None]
    return [None] * (count - len(experts)) + experts, layers


def moe_layers(schema: pa.Schema) -> list[int]:
    """Return the numbers of the layers in the column `routed_experts`, from its metadata; empty if
    they are not there."""
    metadata = schema.field("routed_experts").metadata or {}
    layers: list[int] = json.loads(metadata.get(b"moe_layers", b"[]"))
    return layers


def _pairs(ids: Sequence[int], values: Sequence[float]) -> list[tuple[int, float]]:
    """Return pairs of a token id and its log-probability, as Python numbers."""
    return [(int(id), float(value)) for id, value in zip(ids, values, strict=True)]
