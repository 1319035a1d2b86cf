"""Writes the page about a sweep: the table of its arms, and charts of scores against what
varies."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

from batchgen.evals.arms.arm_table import ArmTable
from batchgen.evals.arms.arm_values import letter, shown_value, table_cells, table_remarks
from batchgen.evals.arms.frontier import Frontier, frontier
from batchgen.pages.report.charts import Chart
from batchgen.pages.report.sections import Fact
from batchgen.pages.report.svg import Frame, drawing, percent, short_number, svg_tag, text
from batchgen.pages.report.write_report import REPORT, page_html, style_sheets
from batchgen.storage.stores.whole_file import write_atomic
from batchgen.util.shorten import short_name
from batchgen.util.text.text_table import number_text

_MOST_CHARTS = 6
_MEASURED = ("tokens_per_forward", "tokens_per_answer")
"""What is shown besides the keys that a sweep varies, where arms differ in it."""


def write_sweep_report(
    folder: Path, display_name: str, table: ArmTable, x: str | None = None
) -> Path:
    """Write the page about the jobs in a folder, with links to their reports; returns its path.

    Raises:
        ConfigError: no arm has the number `x`.
        JobError: it cannot be written.
    """
    path = folder / REPORT
    write_atomic(path, sweep_html(folder, display_name, table, x))
    return path


def sweep_html(folder: Path, display_name: str, table: ArmTable, x: str | None = None) -> str:
    """The text of the page, with a picture of the score against `x`, too, if that is given."""
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
    facts = [Fact("arms", f"{len(table.rows):,}")]
    if (first := table.first) is not None:
        facts.append(Fact("questions", f"{first.questions:,}", f"{first.answers:,} answers of A"))
        scored = [(row.score, at) for at, row in enumerate(table.rows) if row.score is not None]
        score, at = max(scored, key=lambda pair: (pair[0].estimate, -pair[1]))
        facts.append(Fact("highest", shown_value(table.column)(score.estimate), letter(at)))
    return facts


def _reports(folder: Path, jobs: tuple[str, ...]) -> list[tuple[str, str]]:
    """The name and the address of each job's report that is there."""
    names = [Path(job).name for job in jobs]
    return [(name, f"{name}/{REPORT}") for name in names if (folder / name / REPORT).is_file()]


def _frontiers(table: ArmTable, x: str | None) -> Iterator[Frontier]:
    """The scores against each number in which arms differ."""
    scored = [row.arm for row in table.rows if row.score is not None]
    wanted = [] if x is None else [x]
    for key in (*table.differing, *_MEASURED):
        values = {arm.number(key) for arm in scored}
        if len(values) > 1 and None not in values and key not in wanted:
            wanted.append(key)
    return (frontier(table, key) for key in wanted[:_MOST_CHARTS])


def frontier_chart(frontier: Frontier) -> Chart:
    """Each arm's score with its interval, over a number of it."""
    points = frontier.points
    low, high = min(p.low for p in points), max(p.high for p in points)
    left, right = points[0].x, points[-1].x
    margin, above = 0.05 * (right - left) or 0.5, 0.08 * (high - low) or 0.05
    frame = Frame.of((left - margin, right + margin), (low - above, high + above))
    is_share = frontier.column == "mark"
    what = "score" if is_share else frontier.column
    parts = frame.draw(frontier.x, what, y_text=percent if is_share else short_number)
    names_at: dict[tuple[int, int], list[str]] = {}
    for point in points:
        x = frame.x(point.x)
        top, bottom = frame.y(point.high), frame.y(point.low)
        parts.append(svg_tag("line", x1=x, x2=x, y1=top, y2=bottom, class_="whisker"))
        parts.append(svg_tag("circle", cx=x, cy=frame.y(point.score.estimate), r=4, class_="dot"))
        at = round(x), round(frame.y(point.score.estimate))
        names_at.setdefault(at, []).append(point.letter)
    for (x, y), letters in names_at.items():
        parts.append(text(", ".join(letters), x + 7, y + 4, "tick"))
    as_text = shown_value(frontier.column)
    rows = [
        (
            f"{p.letter}  {p.name}",
            number_text(p.x),
            *map(as_text, (p.score.estimate, p.low, p.high)),
        )
        for p in points
    ]
    description = f"{what} by {frontier.x}: " + ", ".join(
        f"{p.letter} {r[2]}" for p, r in zip(points, rows, strict=True)
    )
    note = " ".join(["With 95% intervals for new questions.", *(f"{w}." for w in frontier.without)])
    header = ("arm", frontier.x, what, "low", "high")
    return Chart(
        f"{what.capitalize()} by {frontier.x}", note, drawing(parts, description), header, rows
    )
