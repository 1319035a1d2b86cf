"""The charts of scores in a report: confidence intervals, score against length, and the marks of
each question's samples. `sections.py` uses them."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import numpy as np
from markupsafe import Markup

from batchgen.pages.report.charts import LABEL, LINE, Chart, label
from batchgen.pages.report.report_data import Lengths, Question
from batchgen.pages.report.svg import (
    RIGHT,
    TOP,
    WIDTH,
    Frame,
    Scale,
    drawing,
    percent,
    short_number,
    svg_tag,
    text,
    ticks,
)
from batchgen.util.hidden import visible
from batchgen.util.text.text_table import percent_text as exact_percent


def score_by_length(lengths: Lengths) -> Chart:
    """Return a chart of the mean mark by the length of answers, with two standard errors up and
    down. The answers are in groups of about equal number."""
    total = np.cumsum(lengths.marked)
    count = int(min(10, max(total[-1] // 10, 1)))
    edges = np.searchsorted(total, np.linspace(0, total[-1], count + 1)[1:] - 0.5)
    groups, start = [], 0
    for edge in np.unique(edges).tolist():
        marked = lengths.marked[start : edge + 1]
        n, sum_ = int(marked.sum()), float(lengths.marks[start : edge + 1].sum())
        if n:
            middle = float(np.average(np.arange(start, edge + 1), weights=marked))
            groups.append((start, edge, n, middle, sum_ / n))
        start = edge + 1
    errors = [2 * (max(mean * (1 - mean), 0.25 / n) / n) ** 0.5 for *_, n, _, mean in groups]
    highest = max(mean + error for (*_, mean), error in zip(groups, errors, strict=True))
    frame = Frame.of((0, len(lengths.counts) - 1 or 1), (0, _range([0, highest])[1]))
    parts = frame.draw("tokens of the answer", "mean mark", y_text=percent)
    rows, line = [], []
    for (first, last, n, middle, mean), error in zip(groups, errors, strict=True):
        x = frame.x(middle)
        high, low = frame.y(min(mean + error, 1)), frame.y(max(mean - error, 0))
        parts.append(svg_tag("line", x1=x, x2=x, y1=high, y2=low, class_="whisker"))
        parts.append(svg_tag("circle", cx=x, cy=frame.y(mean), r=4, class_="dot"))
        line.append(f"{x:.1f},{frame.y(mean):.1f}")
        rows.append((f"{first:,}–{last:,}", f"{n:,}", percent(mean)))
    parts.append(svg_tag("polyline", points=" ".join(line), class_="line thin"))
    description = "Score against length: " + ", ".join(f"{r[0]} tokens {r[2]}" for r in rows)
    note = "Answers in groups of about equal number; the lines are two standard errors."
    header = ("tokens", "answers", "mean mark")
    return Chart("Score against length", note, drawing(parts, description), header, rows)


@dataclass(frozen=True, slots=True)
class Estimate:
    """A share, or another number, with its 95% interval.

    Attributes:
        value: None if unknown.
        low, high: the ends of the interval; None if unknown.
        kind: the CSS class of the interval.
    """

    name: str
    value: float | None
    low: float | None
    high: float | None
    kind: str = ""


_TWO_LINES = 40
"""The height of an interval with its name above it, in pixels."""
_ABOVE = 60
"""The maximum number of characters of a name above an interval."""


def intervals(
    title: str,
    estimates: Sequence[Estimate],
    note: str,
    format_value: Callable[[float | None], str] = exact_percent,
) -> Chart:
    """Return a chart of estimates below each other, with their intervals. If some name is long, all
    names are above the intervals.

    Args:
        format_value: formats values. The axis covers round shares for the default, and else the
            range of the values.
    """
    above = any(len(e.name) > LABEL for e in estimates)
    start = 14.0 if above else 14 + 6.8 * max(len(e.name) for e in estimates)
    end, line = WIDTH - 56, _TWO_LINES if above else LINE
    values = [v for e in estimates for v in (e.low, e.value, e.high) if v is not None]
    is_share = format_value is exact_percent
    low, high = _range(values) if is_share else (min(values), max(values))
    scale, bottom = Scale(low, high, start, end), 8 + line * len(estimates)
    parts = []
    for share in ticks(low, high, 4):
        x = scale(share)
        parts.append(svg_tag("line", x1=x, x2=x, y1=2, y2=bottom, class_="grid"))
        mark = percent(share) if is_share else short_number(share)
        parts.append(text(mark, x, bottom + 15, "tick", "middle"))
    for index, estimate in enumerate(estimates):
        y = 4 + (index + 1) * line - LINE / 2
        if above:
            parts.append(text(label(estimate.name, _ABOVE), 0, y - LINE / 2, "label"))
        else:
            parts.append(text(estimate.name, start - 8, y + 4, "label", "end"))
        if estimate.value is None:
            continue
        if estimate.low is not None and estimate.high is not None:
            x1, x2 = scale(estimate.low), scale(estimate.high)
            parts.append(
                svg_tag("line", x1=x1, x2=x2, y1=y, y2=y, class_=f"whisker {estimate.kind}")
            )
        parts.append(svg_tag("circle", cx=scale(estimate.value), cy=y, r=4.5, class_="dot"))
        parts.append(text(format_value(estimate.value), end + 8, y + 4, "tick"))
    rows = [(e.name, *map(format_value, (e.value, e.low, e.high))) for e in estimates]
    description = f"{title}: " + ", ".join(f"{r[0]} {r[1]}" for r in rows)
    svg = drawing(parts, description, bottom + 22)
    return Chart(title, note, svg, ("metric", "value", "low", "high"), rows)


def _range(shares: Sequence[float]) -> tuple[float, float]:
    """Return the ends of an axis of shares, in tenths. It begins at 0 unless all shares are above
    0.5, and ends at 1 unless all are below 0.5."""
    low, high = min(shares, default=0.0), max(shares, default=1.0)
    end = np.ceil(10 * max(high, 0.01)) / 10 if high < 0.5 else 1.0
    return (np.floor(10 * low) / 10 if low > 0.5 else 0.0), end


_LEAST_CELL, _MOST_CELL = 6.5, 14.0
"""The minimum and the maximum size of the cell around a dot, in pixels."""
_GAP = 8.0
"""The space between two lines of questions, in pixels."""


def question_dots(questions: Sequence[Question], links: Mapping[int, str], note: str) -> Chart:
    """Return a chart with a column for each question and in it a dot for each sample. The questions
    with the best means come first.

    Args:
        links: the anchors of rows in the page, by the rows' keys.
    """
    means = [float(np.nanmean(q.marks)) if np.isfinite(q.marks).any() else -1.0 for q in questions]
    high = max(len(q.marks) for q in questions)
    room = WIDTH - 2 * RIGHT
    cell = min(max(room / len(questions), _LEAST_CELL), _MOST_CELL)
    in_line, line = int(room / cell), high * cell + (_GAP if high > 1 else 0)
    parts = []
    for position, index in enumerate(np.argsort(-np.array(means), kind="stable").tolist()):
        below, column = divmod(position, in_line)
        x, y = RIGHT + (column + 0.5) * cell, TOP + below * line + 0.5 * cell
        parts.append(_column(questions[index], x, y, cell, links))
    bottom = TOP + -(-len(questions) // in_line) * line
    right, wrong = sum(mean == 1 for mean in means), sum(mean == 0 for mean in means)
    description = f"Questions: {right} of {len(questions)} always right, {wrong} never"
    rows = Counter(_right(question) for question in questions)
    table = [(kind, f"{count:,}") for kind, count in sorted(rows.items())]
    return Chart(
        "Questions", note, drawing(parts, description, bottom + 4), ("mark", "questions"), table
    )


def _column(
    question: Question, x: float, y: float, cell: float, links: Mapping[int, str]
) -> Markup:
    """Return the dots of one question, from the position (x, y) downwards."""
    dots = [
        svg_tag("circle", cx=x, cy=y + n * cell, r=cell * 0.4, class_=_mark_class(mark))
        for n, mark in enumerate(question.marks.tolist())
    ]
    description = visible(f"{label(question.row_id)}: {_right(question)}")
    column = svg_tag("g", svg_tag("title", description) + Markup("").join(dots))
    anchor = next((links[key] for key in question.keys.tolist() if key in links), None)
    return column if anchor is None else svg_tag("a", column, href=f"#{anchor}")


def _right(question: Question) -> str:
    """Return a text with the sum of a question's marks, and the number of marks."""
    marked = question.marks[np.isfinite(question.marks)]
    return f"{marked.sum():.3g} of {len(marked)}"


def _mark_class(mark: float) -> str:
    """Return the CSS class of a mark; NaN stands for none."""
    if not np.isfinite(mark):
        return "unmarked"
    return "right" if mark == 1 else "wrong" if mark == 0 else "partly"
