"""The sections of a report about scores, and their charts: confidence intervals, score against
length, and the marks of each question's samples."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from markupsafe import Markup

from batchgen.pages.report.charts import LABEL, LINE, Chart, Section, Table, cut_text, label
from batchgen.pages.report.report_data import MOST_QUESTIONS, Collected, Lengths, Question
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
from batchgen.storage.folder.job_summary import JobSummary
from batchgen.util.hidden import visible
from batchgen.util.text.text_table import COUNT_AS, percent_text, score_value, value_range


@dataclass(frozen=True, slots=True)
class _LengthGroup:
    """The answers of `first` to `last` tokens that have a mark."""

    first: int
    last: int
    count: int  # of these answers
    length: float  # the mean length in tokens
    mean: float  # the mean mark

    @property
    def error(self) -> float:
        """Two standard errors of the mean; the variance is at least 1 / (4 count), so that equal
        marks have an error, too."""
        variance = max(self.mean * (1 - self.mean), 0.25 / self.count)
        return 2 * float((variance / self.count) ** 0.5)


def score_by_length(lengths: Lengths) -> Chart:
    """Return a chart of the mean mark by the length of answers, with two standard errors up and
    down. The answers are in groups of about equal number."""
    total = np.cumsum(lengths.marked)  # answers of at most the index's number of tokens
    num_groups = int(min(10, max(total[-1] // 10, 1)))
    # The greatest length of each group.
    edges = np.searchsorted(total, np.linspace(0, total[-1], num_groups + 1)[1:] - 0.5)
    groups, start = list[_LengthGroup](), 0
    for edge in np.unique(edges).tolist():
        marked = lengths.marked[start : edge + 1]
        count, marks = int(marked.sum()), float(lengths.marks[start : edge + 1].sum())
        if count:
            length = float(np.average(np.arange(start, edge + 1), weights=marked))
            groups.append(_LengthGroup(start, edge, count, length, marks / count))
        start = edge + 1
    highest = max(group.mean + group.error for group in groups)
    frame = Frame.of((0, len(lengths.counts) - 1 or 1), (0, _range([0, highest])[1]))
    parts = frame.draw("tokens of the answer", "mean mark", y_text=percent)
    rows, line = [], []
    for group in groups:
        mean, error = group.mean, group.error
        x = frame.x(group.length)
        high, low = frame.y(min(mean + error, 1)), frame.y(max(mean - error, 0))
        parts.append(svg_tag("line", x1=x, x2=x, y1=high, y2=low, class_="whisker"))
        parts.append(svg_tag("circle", cx=x, cy=frame.y(mean), r=4, class_="dot"))
        line.append(f"{x:.1f},{frame.y(mean):.1f}")
        rows.append((f"{group.first:,}–{group.last:,}", f"{group.count:,}", percent(mean)))
    parts.append(svg_tag("polyline", points=" ".join(line), class_="line thin"))
    description = "Score against length: " + ", ".join(
        f"{tokens} tokens {mark}" for tokens, _, mark in rows
    )
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


_MOST_SUBSETS = 100
"""The maximum number of subsets in a chart."""
_TWO_LINES = 40
"""The height of an interval with its name above it, in pixels."""
_ABOVE = 60
"""The maximum number of characters of a name above an interval."""


def intervals(
    title: str,
    estimates: Sequence[Estimate],
    note: str,
    format_value: Callable[[float | None], str] = percent_text,
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
    is_share = format_value is percent_text
    low, high = _range(values) if is_share else (min(values, default=0.0), max(values, default=1.0))
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


def adapter_section(job: JobSummary) -> Section:
    """Return the score of the rows of each LoRA adapter."""
    section, scores = Section("scores", "Scores"), job.adapter_scores
    parts = [
        _estimate(name, score["avg"], interval="population")
        for name, score in scores.items()
        if score["avg"]["value"] is not None
    ]
    if parts:
        note = "With 95% intervals for new questions; batchgen compare OUT --by adapter pairs them."
        as_text = score_value(next(iter(scores.values())))
        section.charts.append(intervals("Adapters", parts, note=note, format_value=as_text))
    return section


def score_section(
    score: Mapping[str, Any] | None, report: Collected, links: Mapping[int, str]
) -> Section:
    """Return the charts of the score: estimates with intervals, subsets, lengths, questions.

    Args:
        score: the entry `score` of metrics.json. Each metric has a `value` and two intervals:
            `population` is for new questions, `same_questions` for new samples of these.
    """
    section = Section("scores", "Scores")
    if score is None or score["avg"]["value"] is None:
        return section
    average = score["avg"]
    estimates = [_estimate("mean", average, interval="population")]
    same = average["same_questions"]
    if same is not None and same["low"] is not None:
        name = "mean, same questions"
        estimates.append(_estimate(name, average, interval="same_questions"))
    elif same is not None:
        section.notes.append(
            "How far the score would move if the same questions were asked again is unknown: all "
            "samples of each question have the same mark."
        )
    if (meaning := COUNT_AS.get(score.get("cut_texts", ""))) is not None:
        section.notes.append(
            f"Texts that were cut at max_new_tokens are {meaning} (score.cut_texts) in the "
            "scores and charts. The rows show the marks that the steps gave them."
        )
    # pass@k, pass^k and maj@k; for k = 1 they are the mean.
    estimates += [
        _estimate(name, metric, interval="population")
        for name, metric in score.items()
        if name.startswith(("pass", "maj")) and metric["value"] is not None
        if name.partition("@")[2] != "1" and not name.endswith("^1")
    ]
    note = (
        "With 95% intervals: blue for new questions of the same kind, orange for the same "
        "questions asked again."
    )
    as_text = score_value(score)
    section.charts.append(intervals("Estimates", estimates, note=note, format_value=as_text))
    subsets = list(score.get("subsets", {}).items())
    if subsets:
        parts = [
            _estimate(name, subset["avg"], interval="population")
            for name, subset in subsets[:_MOST_SUBSETS]
        ]
        note = f"The first {_MOST_SUBSETS} of {len(subsets)}." * (len(subsets) > _MOST_SUBSETS)
        section.charts.append(intervals("Subsets", parts, note=note, format_value=as_text))
    of_marks = "column" not in score  # not the mean of another column
    if of_marks and report.output.marked.sum() > 1:
        section.charts.append(score_by_length(report.output))
    if of_marks and report.questions:
        section.charts.append(question_dots(report.questions, links, _questions_note(report)))
    if (chance := score.get("chance")) is not None:
        section.notes.append(f"{percent_text(chance)} of random guesses would be right.")
    section.table = _shares(score)
    return section


def _shares(score: Mapping[str, Any]) -> Table:
    """Return shares of all answers, such as of those without a mark."""
    rates = [(name.replace("_", " "), percent_text(rate)) for name, rate in score["rates"].items()]
    if "column" not in score:
        lowest, highest = score["bounds"]
        if lowest != highest:
            rates.append(
                (
                    "score if all answers without a mark were wrong, or all right",
                    f"{percent_text(lowest)}, {percent_text(highest)}",
                )
            )
    return Table("What the score leaves open", ("of all answers", "share"), rates)


def _questions_note(report: Collected) -> str:
    """Return the text below the chart of questions."""
    several = max(len(question.marks) for question in report.questions) > 1
    what = (
        "A column is a question and a dot one of its samples" if several else "A dot is a question"
    )
    note = f"{what}, the best first: filled is right, hollow is wrong."
    if report.num_questions > len(report.questions):
        note += f" {MOST_QUESTIONS} of {report.num_questions:,} questions, chosen at random."
    if several:
        note += f" Of all questions {report.disagreeing:,} have samples that disagree."
    return note


def _estimate(name: str, metric: Mapping[str, Any], *, interval: str) -> Estimate:
    """Return a metric of the score with its `interval`, "population" or "same_questions"."""
    bounds = metric[interval] or {"low": None, "high": None}
    return Estimate(
        cut_text(name), metric["value"], low=bounds["low"], high=bounds["high"], kind=interval
    )


def both_intervals(average: Mapping[str, Any], format_value: Callable[[float | None], str]) -> str:
    """Return both intervals of the mean as a text."""
    names = {"population": "new questions", "same_questions": "same questions"}
    ranges = {name: value_range(average[key], format_value) for key, name in names.items()}
    return "; ".join(f"{name} {bounds}" for name, bounds in ranges.items() if bounds)
