"""What `status`, `report` and `view` say of the folder of a pipeline."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import asdict
from html import escape
from pathlib import Path
from typing import Any

from batchgen.pages.report.funnel import HEADER, StepCounts, costs, funnel, funnel_table
from batchgen.storage.folder.job_summary import status_line
from batchgen.storage.folder.open_folder import open_job
from batchgen.storage.folder.step_folders import find_record
from batchgen.storage.folder.worker_status import Status, read_status
from batchgen.storage.stores.whole_file import write_atomic
from batchgen.util.errors import ConfigError

REPORT = "report.html"
_STALE_AFTER = 60.0


def pipeline_counts(out: str) -> list[StepCounts]:
    """The counts of the current steps of the pipeline in a folder, a path or URL."""
    record = find_record(out)
    return [] if record is None else funnel(out, record.current)


def status_text(out: str) -> Iterator[str]:
    """The funnel, and a line for each step that has begun and is not complete."""
    steps = pipeline_counts(out)
    yield funnel_table(steps)
    for step in steps:
        if step.is_begun and step.state != "complete":
            yield status_line(open_job(f"{out}/{step.folder}"), step.name)


def statuses(out: str) -> Mapping[str, Status]:
    """The workers of each step that has begun."""
    found = {}
    for step in pipeline_counts(out):
        try:
            reader = open_job(f"{out}/{step.folder}")
        except ConfigError:  # it has not begun
            continue
        stale_after = reader.config.get("workers", {}).get("stale_after", _STALE_AFTER)
        found[step.name] = read_status(reader.storage, stale_after)
    return found


def summary(out: str) -> dict[str, Any]:
    """All of it as plain values."""
    workers = statuses(out)
    return {
        step.name: {
            **asdict(step),
            "read": step.read,
            "rows": step.rows,
            "kept": step.kept,
            "status": asdict(workers[step.name]) if step.name in workers else None,
        }
        for step in pipeline_counts(out)
    }


def write_report(out: Path, shown: str) -> Path:
    """Write the page about a pipeline, with a link to the report of each step; returns its path."""
    steps = pipeline_counts(str(out))
    path = out / REPORT
    write_atomic(path, report_html(shown, steps, [s.name for s in steps if _has_report(out, s)]))
    return path


def report_html(shown: str, steps: list[StepCounts], linked: list[str]) -> str:
    """The text of the page; steps with these names have reports of their own."""
    title = escape(shown)
    head = "".join(f"<th scope=col>{escape(name)}</th>" for name in HEADER)
    rows = "".join(_row(step, step.name in linked) for step in steps)
    changed = "".join(
        f"<li>{escape(step.name)}: {verb} {count:,} by {escape(what)}</li>"
        for step in steps
        for verb, changes in (("made", step.made), ("dropped", step.dropped))
        for what, count in changes
    )
    left_out = f"<h2>What was made and dropped</h2><ul>{changed}</ul>" if changed else ""
    cost = costs(steps)
    device = "" if cost is None else f"<p>Time of the device: {escape(cost)}.</p>"
    return _PAGE.format(title=title, head=head, rows=rows, left_out=device + left_out)


def _row(step: StepCounts, is_linked: bool) -> str:
    name, *cells = map(escape, step.cells())
    if is_linked:
        name = f'<a href="{escape(step.folder)}/{REPORT}">{name}</a>'
    return f"<tr><th scope=row>{name}</th>{''.join(f'<td>{cell}</td>' for cell in cells)}</tr>"


def _has_report(out: Path, step: StepCounts) -> bool:
    return (out / step.folder / REPORT).is_file()


_PAGE = """\
<!doctype html>
<html lang="en">
<head>
<meta charset="utf-8">
<meta http-equiv="Content-Security-Policy" content="default-src 'none'; style-src 'unsafe-inline'">
<meta name="viewport" content="width=device-width, initial-scale=1">
<title>{title} – batchgen pipeline</title>
<style>
body {{ font: 16px/1.5 system-ui, sans-serif; max-width: 60rem; margin: 2rem auto; }}
table {{ border-collapse: collapse; }}
th, td {{ padding: .3rem .8rem; border-bottom: 1px solid #8886; text-align: right; }}
th:first-child, td:last-child, th:last-child {{ text-align: left; }}
@media (prefers-color-scheme: dark) {{
  body {{ background: #111; color: #eee; }}
  a {{ color: #8bf; }}
}}
</style>
</head>
<body>
<h1>{title}</h1>
<table><thead><tr>{head}</tr></thead><tbody>{rows}</tbody></table>
{left_out}
</body>
</html>
"""
