"""The parts of a report: numbers at the top, sections, tables and charts.

A chart is an SVG with a text alternative, and its numbers as a table.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Any, NamedTuple

import numpy as np
from markupsafe import Markup

from batchgen.pages.report.report_data import Ints, Lengths
from batchgen.pages.report.svg import (
    LEFT,
    RIGHT,
    TOP,
    WIDTH,
    Frame,
    Scale,
    axis_names,
    drawing,
    percent,
    short_number,
    svg_tag,
    text,
    whole,
)
from batchgen.util.shorten import both_ends

_LEAST_BINS, _BINS = 8, 30
"""The minimum width of a histogram's axis in bins, so that few bins are not drawn wide, and the
maximum number of bins."""
_MOST_COLUMNS = 64
"""The maximum number of columns of `numbers`."""
LINE = 24
"""The height of a line of bars, in pixels."""
LABEL = 26
"""The maximum number of characters of a bar's label."""
_MOST_TEXT = 300
"""The maximum number of characters of a message or a name."""


@dataclass(frozen=True)
class Chart:
    """A chart, and its numbers as a table.

    Attributes:
        note: a text below the title; may be empty.
        header: the names of the table's columns.
        rows: the lines of the table.
    """

    title: str
    note: str
    svg: Markup
    header: tuple[str, ...] = ()
    rows: Sequence[tuple[str, ...]] = ()


class Table(NamedTuple):
    """A table of texts: its title, the names of its columns, and its lines."""

    title: str
    header: Sequence[str]
    rows: Sequence[Sequence[str]]


@dataclass
class Section:
    """A part of the page: a heading, then sentences, charts and a table, in this order.

    Attributes:
        id: the HTML id of the part, to which links lead.
        notes: the sentences below the heading.
    """

    id: str
    title: str
    notes: list[str] = field(default_factory=list)
    charts: list[Chart] = field(default_factory=list)
    table: Table | None = None


@dataclass(frozen=True, slots=True)
class Fact:
    """A number at the top of the page, and a note in small print, such as its interval."""

    name: str
    value: str
    note: str = ""


def cut_text(text: str) -> str:
    """Return a text, cut after _MOST_TEXT characters."""
    return text if len(text) <= _MOST_TEXT else text[:_MOST_TEXT] + "…"


def label(name: str, limit: int = LABEL) -> str:
    """Return a name, shortened as the label of a bar."""
    return both_ends(name, limit)


def bars(
    title: str,
    counts: Mapping[str, float],
    name: str,
    note: str = "",
    *,
    unit: str = "answers",
    number: Callable[[float], str] = "{:,}".format,
    ranked: bool = True,
) -> Chart:
    """Return a bar chart of counts, or of other amounts.

    Args:
        counts: the amount of each kind, of which 20 are drawn.
        name: the heading of the kinds.
        unit: the heading of the amounts.
        number: formats an amount.
        ranked: whether the largest amounts come first; else the order is kept.
    """
    items = list(counts.items())
    if ranked:
        items.sort(key=lambda item: -item[1])
    items = items[:20]
    total, highest = sum(counts.values()) or 1, max(counts.values(), default=1) or 1
    # Bars begin behind the labels: 6.8 is the width of a character.
    start = 14 + 6.8 * max((len(label(kind)) for kind, _ in items), default=0)
    scale = Scale(0, highest, start, WIDTH - 96)
    parts = []
    for index, (kind, count) in enumerate(items):
        y = 4 + index * LINE
        parts.append(text(label(kind), start - 8, y + 15, "label", "end"))
        width = max(scale(count) - start, 1)
        parts.append(svg_tag("rect", x=start, y=y + 3, width=width, height=LINE - 8, class_="bar"))
        label_text = f"{number(count)} ({percent(count / total)})"
        parts.append(text(label_text, start + width + 6, y + 15, "tick"))
    description = f"{title}: " + ", ".join(f"{kind} {number(count)}" for kind, count in items)
    rows = [(kind, number(count), percent(count / total)) for kind, count in items]
    svg = drawing(parts, description, 8 + LINE * len(items))
    return Chart(title, note, svg, (name, unit, "share"), rows)


def histogram(title: str, lengths: Lengths, name: str, note: str = "") -> Chart:
    """Return a histogram of lengths."""
    top = len(lengths.counts) - 1
    low = int(np.flatnonzero(lengths.counts)[0])
    width = max(int(np.ceil((top - low + 1) / _BINS)), 1)
    first = low // width * width
    starts = np.arange(first, top + 1, width)
    sums = np.add.reduceat(np.append(lengths.counts, 0), starts)
    bins = [
        (start, count) for start, count in zip(starts.tolist(), sums.tolist(), strict=True) if count
    ]
    end = first + max(len(starts), _LEAST_BINS) * width
    frame = Frame.of((first, end), (0, float(sums.max()) * 1.05))
    gap = 0.5 * (end - first) / (frame.x(end) - frame.x(first))  # half an SVG unit, in tokens
    parts = frame.draw(name, "answers", whole, whole)
    parts += [frame.column(start + gap, start + width - gap, count) for start, count in bins]
    quantiles = {"median": 0.5, "90%": 0.9, "99%": 0.99, "longest": 1.0}
    facts = [f"{kind} {lengths.quantile(share):,}" for kind, share in quantiles.items()]
    description = ", ".join([f"mean {lengths.mean:,.1f}", *facts])
    svg = drawing(parts, f"{title}, {lengths.total:,} answers: {description}")
    rows = [
        (f"{start:,}–{start + width - 1:,}" if width > 1 else f"{start:,}", f"{count:,}")
        for start, count in bins
    ]
    return Chart(title, f"{description}. {note}".strip(), svg, (name, "answers"), rows)


def numbers(
    title: str,
    counts: Mapping[int, int],
    x_name: str,
    y_name: str,
    note: str = "",
    of: int | None = None,
) -> Chart:
    """Return a chart of how often each small number occurs, as shares of `of`, by default of
    all."""
    bars = {n: counts[n] for n in sorted(counts)[:_MOST_COLUMNS]}
    total = of or sum(counts.values()) or 1
    first, last = min(bars), max(bars)
    frame = Frame.of((first - 0.5, last + 0.5), (0, max(bars.values()) / total * 1.05))
    parts = frame.draw(x_name, y_name, whole, percent)
    parts += [frame.column(n - 0.38, n + 0.38, count / total) for n, count in bars.items()]
    rows = [(f"{n}", f"{count:,}", percent(count / total)) for n, count in bars.items()]
    description = f"{title}: " + ", ".join(f"{n}: {share}" for n, _, share in rows[:20])
    return Chart(title, note, drawing(parts, description), (x_name, "count", "share"), rows)


def over_time(
    title: str, points: Sequence[tuple[float, float]], y_name: str, note: str = ""
) -> Chart:
    """Return a line chart of points (seconds, value)."""
    last, highest = points[-1][0], max(value for _, value in points)
    divisor, unit = next(((d, u) for d, u in ((3600, "hours"), (60, "minutes")) if last > 3 * d),
                         (1, "seconds"))  # fmt: skip
    frame = Frame.of((0, last / divisor), (0, highest * 1.05 or 1))
    parts = frame.draw(f"{unit} of generating", y_name)
    coordinates = [(frame.x(x / divisor), frame.y(y)) for x, y in points]
    path = " ".join(f"{x:.1f},{y:.1f}" for x, y in coordinates)
    area = (
        f"{coordinates[0][0]:.1f},{frame.y(0):.1f} {path} {coordinates[-1][0]:.1f},{frame.y(0):.1f}"
    )
    parts += [svg_tag("polygon", points=area, class_="area"),
              svg_tag("polyline", points=path, class_="line")]  # fmt: skip
    every = max(len(points) // 24, 1)
    rows = [(f"{x / divisor:,.3g}", short_number(y)) for x, y in points[::every]]
    ends = f"from {short_number(points[0][1])} to {short_number(points[-1][1])}"
    label = f"{title}: {ends}, at most {short_number(highest)}"
    return Chart(title, note, drawing(parts, label), (unit, y_name), rows)


def experts(counts: Ints, layers: Sequence[int], note: str) -> Chart:
    """Return a heat map of how often each expert was used, by layer.

    Args:
        counts: [L, E], how often each expert of each layer was used.
        layers: [L], the numbers of the layers.
    """
    height = min(max(260 / len(layers), 2.0), 14.0)
    width = (WIDTH - LEFT - RIGHT) / counts.shape[1]
    loads = counts / np.maximum(counts.mean(1, keepdims=True), 1e-9)  # [L, E], 1 is the mean
    # Levels 0 to 6 stand for an eighth of the mean to eight times the mean.
    levels = np.clip(np.round(np.log2(np.maximum(loads, 1 / 16)) + 3), 0, 6).astype(int)
    parts = []
    for level in range(7):
        cells = [
            f"M{LEFT + e * width:.1f} {TOP + i * height:.1f}h{width:.1f}v{height:.1f}h-{width:.1f}z"
            for i, e in np.argwhere(levels == level).tolist()
        ]
        if cells:
            parts.append(svg_tag("path", d="".join(cells), class_=f"load{level}"))
    bottom = TOP + height * len(layers)
    for i in {0, len(layers) // 2, len(layers) - 1}:
        y = TOP + (i + 0.5) * height + 4
        parts.append(text(str(layers[i]), LEFT - 6, y, "tick", "end"))
    parts += axis_names("expert", "layer", bottom - 18)
    shares = counts.max(1) / np.maximum(counts.sum(1), 1)
    figures = zip(layers, shares, loads.max(1), (counts == 0).sum(1), strict=True)
    rows = [(str(n), percent(share), f"{load:.2f}", str(none)) for n, share, load, none in figures]
    description = (
        f"Load of experts in {len(layers)} layers: the busiest has {loads.max():.1f} times the mean"
    )
    header = ("layer", "busiest expert's share", "of the mean", "experts never used")
    return Chart("Load of experts", note, drawing(parts, description, bottom + 26), header, rows)


def timeline_charts(points: Sequence[Sequence[Any]]) -> list[Chart]:
    """Return charts of tokens per second and of finished answers over time; none for fewer than
    three points, or if no time passes. A point is (seconds, finished answers, generated tokens)."""
    if len(points) < 3 or not points[-1][0]:
        return []
    if points[0][0] > 0:
        points = [(0, 0, 0), *points]
    last_seconds = points[-1][0]
    # Many rows end in one step and their tokens are counted at once, so speeds are averaged over at
    # least a thirtieth of the time.
    thin = [points[0]]
    for point in points:
        if point[0] - thin[-1][0] >= last_seconds / 30:
            thin.append(point)
    speeds = [
        (seconds, max(tokens - tokens_before, 0) / (seconds - seconds_before))
        for (seconds_before, _, tokens_before), (seconds, _, tokens) in pairwise(thin)
    ]
    rows = [(seconds, answers) for seconds, answers, _ in points]
    charts = [over_time("Answers over time", rows, "answers done")]
    if len(speeds) > 1:
        charts.insert(0, over_time("Speed over time", speeds, "tokens per second"))
    return charts
