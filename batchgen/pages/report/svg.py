"""Pieces of the SVG charts of a report: elements, scales and axes.

Coordinates are SVG units: x grows to the right and y downwards. CSS classes, which `report.css`
defines, set colours and fonts.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from markupsafe import Markup, escape

from batchgen.util.hidden import visible

WIDTH, HEIGHT = 440, 232
"""The size of a chart in SVG units; the page scales the chart to its width."""
LEFT, RIGHT, TOP, BOTTOM = 60, 12, 10, 42
"""Margins around the area between the axes, in SVG units."""


def svg_tag(name: str, content: str = "", /, **attributes: str | float) -> Markup:
    """Return an element; `class_` and `text_anchor` are the attributes class and text-anchor."""
    attributes_text = "".join(
        f' {key.rstrip("_").replace("_", "-")}="{_value(value)}"'
        for key, value in attributes.items()
    )
    return Markup(f"<{name}{attributes_text}>{escape(content)}</{name}>")


def text(content: str, x: float, y: float, class_: str = "", anchor: str = "") -> Markup:
    """Return a text element. `anchor` says which part of the text is at (x, y): its "middle", its
    "end", or if empty its start."""
    options = {"text_anchor": anchor} if anchor else {}
    return svg_tag("text", visible(content), x=x, y=y, class_=class_, **options)


def axis_names(x_name: str, y_name: str, bottom: float = HEIGHT - BOTTOM) -> list[Markup]:
    """Return the names of both axes; `bottom` is the y coordinate of the horizontal axis."""
    middle = (TOP + bottom) / 2
    turned = {"text_anchor": "middle", "transform": f"rotate(-90 10 {middle:.0f})"}
    return [
        text(
            x_name,
            x=(LEFT + WIDTH - RIGHT) / 2,
            y=bottom + BOTTOM - 6,
            class_="name",
            anchor="middle",
        ),
        svg_tag("text", visible(y_name), x=10, y=middle, class_="name", **turned),
    ]


def _value(value: str | float) -> Markup:
    """Return the value of an attribute: a number has at most two decimals."""
    if isinstance(value, str):
        return escape(visible(value))
    return Markup(f"{value:.2f}".rstrip("0").rstrip("."))


def drawing(content: Sequence[str], label: str, height: float = HEIGHT) -> Markup:
    """Return a whole chart from its elements. `label` describes it for screen readers."""
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
    """Return about `limit` round numbers from `low` to `high`. Their distance is 1, 2, 2.5 or 5
    times a power of 10."""
    span = (high - low) or 1.0
    rough = span / limit
    power = 10.0 ** math.floor(math.log10(rough))
    # 0.999 and 1e-9 allow for rounding errors.
    step = next(power * m for m in (1, 2, 2.5, 5, 10) if power * m >= rough * 0.999)
    first = math.ceil(low / step - 1e-9)
    return [step * i for i in range(first, math.floor(high / step + 1e-9) + 1)]


def short_number(value: float) -> str:
    """Return a number in a few characters, such as 12.3k. Thousands are cut from 10,000 on."""
    for bound, unit, name in ((1e9, 1e9, "G"), (1e6, 1e6, "M"), (1e4, 1e3, "k")):
        if abs(value) >= bound:
            return f"{value / unit:.3g}{name}"
    return f"{value:,.0f}" if value == int(value) else f"{value:.3g}"


def whole(value: float) -> str:
    """Return a whole number in a few characters, and an empty text for another number."""
    return short_number(value) if value == round(value) else ""


def percent(value: float) -> str:
    return f"{100 * value:.3g}%"


@dataclass(frozen=True)
class Frame:
    """The axes of a chart: scales from values to coordinates."""

    x: Scale
    y: Scale

    @staticmethod
    def of(x: tuple[float, float], y: tuple[float, float]) -> Frame:
        """Return axes for the ranges (low, high) of the values x and y."""
        return Frame(
            x=Scale(*x, start=LEFT, end=WIDTH - RIGHT), y=Scale(*y, start=HEIGHT - BOTTOM, end=TOP)
        )

    def column(self, low: float, high: float, value: float) -> Markup:
        """Return a bar from the x value `low` to the x value `high`, from y = 0 to y = `value`. It
        is at least one unit high, so that it is visible."""
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
        """Return the lines, numbers and names of the axes.

        Args:
            x_text, y_text: format the numbers at the axes. Values of y whose text is empty have no
                line.
        """
        bottom, parts = HEIGHT - BOTTOM, []
        for value in ticks(self.y.low, self.y.high, limit=4):
            if not y_text(value):
                continue
            at = self.y(value)
            parts.append(svg_tag("line", x1=LEFT, x2=WIDTH - RIGHT, y1=at, y2=at, class_="grid"))
            parts.append(text(y_text(value), LEFT - 6, at + 4, class_="tick", anchor="end"))
        for value in ticks(self.x.low, self.x.high):
            at = self.x(value)
            parts.append(svg_tag("line", x1=at, x2=at, y1=bottom, y2=bottom + 4, class_="axis"))
            parts.append(text(x_text(value), at, bottom + 17, class_="tick", anchor="middle"))
        parts.append(
            svg_tag("line", x1=LEFT, x2=WIDTH - RIGHT, y1=bottom, y2=bottom, class_="axis")
        )
        return parts + axis_names(x_name, y_name)
