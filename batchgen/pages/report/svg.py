"""Pieces of the SVG charts of a report: elements, scales and axes. Classes of `report.css` set
colours and fonts."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from markupsafe import Markup, escape

from batchgen.util.hidden import visible

WIDTH, HEIGHT = 440, 232
"""The size of a chart in SVG units; the page scales the chart to its width."""
LEFT, RIGHT, TOP, BOTTOM = 60, 12, 10, 42
"""Margins around what is drawn."""


def svg_tag(name: str, content: str = "", /, **attributes: str | float) -> Markup:
    """An element; `class_` and `text_anchor` are the attributes class and text-anchor."""
    attributes_text = "".join(
        f' {key.rstrip("_").replace("_", "-")}="{_value(value)}"'
        for key, value in attributes.items()
    )
    return Markup(f"<{name}{attributes_text}>{escape(content)}</{name}>")


def text(content: str, x: float, y: float, class_: str = "", anchor: str = "") -> Markup:
    """A text element. `anchor` says which part of the text is at (x, y): the start, the `middle` or
    the `end`."""
    options = {"text_anchor": anchor} if anchor else {}
    return svg_tag("text", visible(content), x=x, y=y, class_=class_, **options)


def axis_names(x_name: str, y_name: str, bottom: float = HEIGHT - BOTTOM) -> list[Markup]:
    """The names of both axes; `bottom` is the y coordinate of the horizontal axis."""
    middle = (TOP + bottom) / 2
    turned = {"text_anchor": "middle", "transform": f"rotate(-90 10 {middle:.0f})"}
    return [
        text(x_name, (LEFT + WIDTH - RIGHT) / 2, bottom + BOTTOM - 6, "name", "middle"),
        svg_tag("text", visible(y_name), x=10, y=middle, class_="name", **turned),
    ]


def _value(value: str | float) -> Markup:
    if isinstance(value, str):
        return escape(visible(value))
    return Markup(f"{value:.2f}".rstrip("0").rstrip("."))


def drawing(content: Sequence[str], label: str, height: float = HEIGHT) -> Markup:
    """A whole chart. `label` describes it for screen readers."""
    box = f"0 0 {WIDTH} {height:.0f}"
    return svg_tag("svg", Markup("").join(content), viewBox=box, role="img", aria_label=label)


@dataclass(frozen=True, slots=True)
class Scale:
    """A linear map from values `low` … `high` to coordinates `start` … `end`."""

    low: float
    high: float
    start: float
    end: float

    def __call__(self, value: float) -> float:
        share = (value - self.low) / ((self.high - self.low) or 1.0)
        return self.start + share * (self.end - self.start)


def ticks(low: float, high: float, limit: int = 5) -> list[float]:
    """Round numbers from `low` to `high`, about `limit` of them."""
    span = (high - low) or 1.0
    rough = span / limit
    power = 10.0 ** math.floor(math.log10(rough))
    step = next(power * m for m in (1, 2, 2.5, 5, 10) if power * m >= rough * 0.999)
    first = math.ceil(low / step - 1e-9)
    return [step * i for i in range(first, math.floor(high / step + 1e-9) + 1)]


def short_number(value: float) -> str:
    """A number in a few characters."""
    for bound, name in ((1e9, "G"), (1e6, "M"), (1e4, "k")):
        if abs(value) >= bound:
            return f"{value / (1e3 if name == 'k' else bound):.3g}{name}"
    return f"{value:,.0f}" if value == int(value) else f"{value:.3g}"


def whole(value: float) -> str:
    """A count in a few characters; empty for a number that is not whole."""
    return short_number(value) if value == round(value) else ""


def percent(value: float) -> str:
    return f"{100 * value:.3g}%"


@dataclass(frozen=True)
class Frame:
    """The axes of a chart: the scales of x and y."""

    x: Scale
    y: Scale

    @staticmethod
    def of(x: tuple[float, float], y: tuple[float, float]) -> Frame:
        """Axes for values in the ranges x and y."""
        return Frame(Scale(*x, LEFT, WIDTH - RIGHT), Scale(*y, HEIGHT - BOTTOM, TOP))

    def column(self, low: float, high: float, value: float) -> Markup:
        """A bar from x=`low` to x=`high` with the height `value`; at least one unit high, so that
        it is visible."""
        x, y = self.x(low), min(self.y(value), self.y(0) - 1)
        width = max(self.x(high) - x, 0.5)
        return svg_tag("rect", x=x, y=y, width=width, height=self.y(0) - y, class_="bar")

    def draw(
        self,
        x_name: str,
        y_name: str,
        x_text: Callable[[float], str] = short_number,
        y_text: Callable[[float], str] = short_number,
    ) -> list[Markup]:
        """The lines, numbers and names of the axes. Values for which `y_text` returns an empty text
        have no line."""
        bottom, parts = HEIGHT - BOTTOM, []
        for value in ticks(self.y.low, self.y.high, 4):
            if not y_text(value):
                continue
            at = self.y(value)
            parts.append(svg_tag("line", x1=LEFT, x2=WIDTH - RIGHT, y1=at, y2=at, class_="grid"))
            parts.append(text(y_text(value), LEFT - 6, at + 4, "tick", "end"))
        for value in ticks(self.x.low, self.x.high):
            at = self.x(value)
            parts.append(svg_tag("line", x1=at, x2=at, y1=bottom, y2=bottom + 4, class_="axis"))
            parts.append(text(x_text(value), at, bottom + 17, "tick", "middle"))
        parts.append(
            svg_tag("line", x1=LEFT, x2=WIDTH - RIGHT, y1=bottom, y2=bottom, class_="axis")
        )
        return parts + axis_names(x_name, y_name)
