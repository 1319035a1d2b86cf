"""Writes the page about a sweep, jobs that differ in some keys of their configuration.

An arm is the jobs of a sweep that differ in their seed alone. The page has a table with a line and
a letter (A, B, …) for each arm, and charts of the arms' scores against the keys that differ.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

from batchgen.evals.arms.arm_table import ArmTable
from batchgen.evals.arms.arm_values import letter, shown_value, table_cells, table_remarks
from batchgen.evals.arms.frontier import Frontier, frontier
from batchgen.pages.report.charts import Chart, Fact
from batchgen.pages.report.svg import Frame, drawing, percent, short_number, svg_tag, text
from batchgen.pages.report.write_report import REPORT, page_html, style_sheets
from batchgen.storage.stores.whole_file import write_atomic
from batchgen.util.shorten import short_name
from batchgen.util.text.text_table import number_text

_MOST_CHARTS = 6
_MEASURED = ("tokens_per_forward", "tokens_per_answer")
"""Measured numbers that have a chart, too, if arms differ in them."""


def write_sweep_report(
    folder: Path, display_name: str, table: ArmTable, x: str | None = None
) -> Path:
    """Write the page about the jobs in a folder, with links to their reports; return its path.

    Args:
        display_name: what people call the folder.
        x: a key of the configuration, or a measured number, for one more chart of the score.

    Raises:
        ConfigError: no arm has the number `x`.
        JobError: the page cannot be written.
    """
    path = folder / REPORT
    write_atomic(path, sweep_html(folder, display_name, table, x))
    return path


def sweep_html(folder: Path, display_name: str, table: ArmTable, x: str | None = None) -> str:
    """Return the HTML of the page that `write_sweep_report` writes."""
    header, *cells = table_cells(table)
    return page_html(
        "sweep.html.jinja",
        style_sheets(),
        title=short_name(display_name),
        path=display_name,
        facts=_headline(table),
        header=header,
        rows=list(
            zip(cells, [_reports(folder, row.arm.folders) for row in table.rows], strict=True)
        ),
        remarks=table_remarks(table),
        charts=[frontier_chart(frontier) for frontier in _frontiers(table, x)],
    )


def _headline(table: ArmTable) -> list[Fact]:
    """Return the numbers at the top: arms, questions, the highest score and the letter of its arm.
    Of equal scores the first arm counts. Without any score there are only the arms."""
    facts = [Fact("arms", f"{len(table.rows):,}")]
    estimates = {
        index: row.score.estimate for index, row in enumerate(table.rows) if row.score is not None
    }
    if estimates:
        compared = min(estimates)  # the arm that all others are compared with, `table.first`
        first = table.rows[compared]
        answers = f"{first.answers:,} answers of {letter(compared)}"
        facts.append(Fact("questions", f"{first.questions:,}", answers))
        best = max(estimates, key=lambda index: estimates[index])
        facts.append(Fact("highest", shown_value(table.column)(estimates[best]), letter(best)))
    return facts


def _reports(folder: Path, jobs: tuple[str, ...]) -> list[tuple[str, str]]:
    """Return the name and the relative URL of each job's report that exists."""
    names = [Path(job).name for job in jobs]
    return [(name, f"{name}/{REPORT}") for name in names if (folder / name / REPORT).is_file()]


def _frontiers(table: ArmTable, x: str | None) -> Iterator[Frontier]:
    """Return the data of a chart for `x` and for each number in which arms with a score differ."""
    scored = [row.arm for row in table.rows if row.score is not None]
    wanted = [] if x is None else [x]
    for key in (*table.differing, *_MEASURED):
        values = {arm.number(key) for arm in scored}
        if len(values) > 1 and None not in values and key not in wanted:
            wanted.append(key)
    return (frontier(table, key) for key in wanted[:_MOST_CHARTS])


def frontier_chart(frontier: Frontier) -> Chart:
    """Return a chart with a dot for each arm: its number `frontier.x` to the right, its score
    upwards with its 95% interval."""
    points = frontier.points
    low = min(point.low for point in points)
    high = max(point.high for point in points)
    left, right = points[0].x, points[-1].x  # points ascend
    x_margin, y_margin = 0.05 * (right - left) or 0.5, 0.08 * (high - low) or 0.05
    frame = Frame.of(x=(left - x_margin, right + x_margin), y=(low - y_margin, high + y_margin))
    is_share = frontier.column == "mark"
    y_name = "score" if is_share else frontier.column
    parts = frame.draw(frontier.x, y_name, y_text=percent if is_share else short_number)
    letters_at: dict[tuple[int, int], list[str]] = {}  # dots at the same place share a text
    for point in points:
        x = frame.x(point.x)
        top, bottom = frame.y(point.high), frame.y(point.low)
        parts.append(svg_tag("line", x1=x, x2=x, y1=top, y2=bottom, class_="whisker"))
        parts.append(svg_tag("circle", cx=x, cy=frame.y(point.score.estimate), r=4, class_="dot"))
        at = round(x), round(frame.y(point.score.estimate))
        letters_at.setdefault(at, []).append(point.letter)
    for (x, y), letters in letters_at.items():
        parts.append(text(", ".join(letters), x + 7, y + 4, class_="tick"))
    as_text = shown_value(frontier.column)
    rows = [
        (
            f"{point.letter}  {point.name}",
            number_text(point.x),
            as_text(point.score.estimate),
            as_text(point.low),
            as_text(point.high),
        )
        for point in points
    ]
    description = f"{y_name} by {frontier.x}: " + ", ".join(
        f"{point.letter} {as_text(point.score.estimate)}" for point in points
    )
    remarks = (f"{remark}." for remark in frontier.without)
    return Chart(
        title=f"{y_name.capitalize()} by {frontier.x}",
        note=" ".join(["With 95% intervals for new questions.", *remarks]),
        svg=drawing(parts, description),
        header=("arm", frontier.x, y_name, "low", "high"),
        rows=rows,
    )
