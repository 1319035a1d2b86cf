"""Writes `report.html`: one file about a job, without scripts or references to other files. A job
calls `try_report` at its end, and `batchgen report` calls `make_report`."""

from __future__ import annotations

import base64
import hashlib
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from markupsafe import Markup

from batchgen.config.groups.dataset_config import dataset_name
from batchgen.inputs.images.thumbnails import read_thumbnails
from batchgen.pages.report.example_rows import ExampleRows, anchor, faults, shown_rows
from batchgen.pages.report.report_data import collect_report
from batchgen.pages.report.report_rows import JobData
from batchgen.pages.report.sections import headline, sections
from batchgen.pages.report.token_facts import token_facts
from batchgen.pages.rows.grade_columns import MARK
from batchgen.pages.rows.row_page import CSS, RowPage
from batchgen.pages.tokens.decode_tokens import job_decode
from batchgen.pages.tokens.token_boxes import Decode
from batchgen.storage.folder.job_summary import JobSummary, cut_remark, tokens_per_s
from batchgen.storage.folder.read_job import JobFolderReader
from batchgen.storage.shards.enough import enough_text
from batchgen.storage.stores.job_storage import Storage
from batchgen.storage.stores.whole_file import write_atomic
from batchgen.util.duration import duration
from batchgen.util.errors import JobError
from batchgen.util.hidden import visible
from batchgen.util.shorten import short_name
from batchgen.util.text.safe_text import templates
from batchgen.util.text.text_table import counted

REPORT = "report.html"
MOST_BYTES = 5_000_000
"""The maximum size of the page, so that it can be sent and opens at once."""
_HEADING = 1500
"""The maximum number of bytes of a row's heading and markup."""
_MOST_CONFIG = 60_000
"""The maximum number of characters of config.yaml in the page."""
_MOST_ATTEMPTS = 20
"""How many attempts, runs of the job, the page lists: the last ones."""


def is_up_to_date(storage: Storage) -> bool:
    """Return whether a job has a report that is not older than metrics.json, which holds the
    scores."""
    report = storage.modified(storage.path / REPORT)
    metrics = storage.modified(storage.path / "metrics.json")
    return report is not None and metrics is not None and report >= metrics


def try_report(
    job: Path, decode: Decode | None = None, display_name: str | None = None
) -> Path | None:
    """Make the report of a finished job and return its path. If that fails, print a warning and
    return None.

    Args:
        decode: turns token ids into text; None looks for the tokenizer of the job's model.
        display_name: what people call the job's folder, if it is not `job`.
    """
    try:
        return make_report(job, decode)
    except Exception as error:  # a page for people must not fail hours of work that are done
        name = str(job) if display_name is None else display_name
        print(
            f"warning: {name}/{REPORT} could not be made ({type(error).__name__}: {error}). The "
            f"rows are complete; `batchgen report {name}` tries again, output.report=false leaves "
            "it out",
            file=sys.stderr,
        )
        return None


def make_report(job: Path, decode: Decode | None = None) -> Path:
    """Write the report of a job, complete or not, and return its path.

    Args:
        decode: turns token ids into text; None looks for the tokenizer of the job's model.

    Raises:
        ConfigError: the folder holds no job.
        JobError: a file is damaged, or the report cannot be written.
    """
    path = job / REPORT
    write_atomic(path, report_html(JobFolderReader(job), decode))
    return path


def report_html(reader: JobFolderReader, decode: Decode | None = None) -> str:
    """Return the HTML of the page, at most MOST_BYTES.

    Raises:
        JobError: a file of the job is damaged.
    """
    try:
        return _html(reader, decode)
    except (AttributeError, IndexError, KeyError, TypeError, ValueError) as error:
        raise JobError(
            f"{reader.path}: no report can be made of what metrics.json, manifest.json and "
            f"config.yaml say ({type(error).__name__}: {error}): they are damaged, or were not "
            "written by batchgen; without metrics.json there is a report of the rows alone"
        ) from error


def _html(reader: JobFolderReader, decode: Decode | None) -> str:
    metrics, data = reader.metrics, JobData(reader)
    job = JobSummary.of(metrics, reader.config, reader.row_facts, questions=reader.questions)
    cut_texts = (job.score or {}).get("cut_texts", "as_marked")
    report = collect_report(data, cut_texts, job.group("score").get("subset"))
    tokens = token_facts(data)
    links = {key: anchor(key) for key in report.chosen()}
    timeline = metrics.get("timeline", [])
    values: dict[str, Any] = {
        **_about(reader, job, data),
        "facts": headline(job, report),
        "sections": sections(job, timeline, report, tokens, links),
        "total_rows": report.rows,
        "faults": faults(report),
        "is_graded": data.grades is not None and MARK in data.grades,
    }
    frame = _page(values, ExampleRows((), 0, 0))  # without rows
    room = MOST_BYTES - len(frame.encode()) - _HEADING * len(links)
    if data.schema is None or room < 0:
        return frame
    thumbnails = read_thumbnails(reader.path)
    page = RowPage(job.config, data.schema, decode or job_decode(job.config), thumbnails)
    rows = shown_rows(data, page, report, room)
    if rows.dropped:  # rows for which there was no room: no link may lead to them
        there = {row.anchor for row in rows.rows}
        links = {key: name for key, name in links.items() if name in there}
        values["sections"] = sections(job, timeline, report, tokens, links)
    return _page(values, rows)


def _page(values: Mapping[str, Any], rows: ExampleRows) -> str:
    """Return the HTML of a report with these values and rows."""
    hiding = "".join(  # a radio button for each kind of rows, which hides the others
        f"#k-{kind}:checked ~ .list > :not(.k-{kind}) {{ display: none; }}\n"
        for kind, _, _ in rows.kinds
    )
    return page_html("report.html.jinja", style_sheets() + hiding, **values, shown=rows)


def page_html(template: str, style: str, **values: Any) -> str:
    """Return a page of a template. Its Content-Security-Policy allows this style sheet and embedded
    pictures and nothing else."""
    digest = base64.b64encode(hashlib.sha256(style.encode()).digest()).decode()
    policy = (
        f"default-src 'none'; style-src 'sha256-{digest}'; img-src data:; base-uri 'none'; "
        "form-action 'none'"
    )
    template_file = templates("batchgen.pages.report").get_template(template)
    return template_file.render(values, style=Markup(style), policy=policy)


def style_sheets() -> str:
    """Return the CSS of all reports."""
    sheets = [*CSS, Path(__file__).parent / "report.css"]
    return "".join(path.read_text(encoding="utf-8") for path in sheets)


def _about(reader: JobFolderReader, job: JobSummary, data: JobData) -> dict[str, Any]:
    """Return the values that the template shows about the job besides sections and rows."""
    manifest = reader.manifest
    file = reader.path / "config.yaml"
    text = visible(file.read_text(encoding="utf-8")) if file.is_file() else ""
    if len(text) > _MOST_CONFIG:
        text = text[:_MOST_CONFIG] + f"\n… {len(text) - _MOST_CONFIG:,} characters are left out"
    return {
        "model": short_name(job.model_name),
        "dataset": _dataset(job.group("dataset")),
        "paths": f"{job.model_name} on {dataset_name(job.group('dataset'))}",
        "strategy": _strategy(job),
        "started": job.attempts[0].get("started", "") if job.attempts else "",
        "status": _status(job),
        "warnings": _warnings(job, data),
        "config": text,
        "versions": manifest["versions"],
        "fingerprints": manifest["fingerprints"],
        "attempts": [_attempt(attempt) for attempt in job.attempts[-_MOST_ATTEMPTS:]],
    }


def _dataset(dataset: Mapping[str, Any]) -> str:
    """Return a data set's short name, with its subset (dataset.name) and split."""
    path = ", ".join(map(short_name, dataset_name(dataset).split(", ")))
    parts = [path, dataset.get("name"), dataset.get("split")]
    return " ".join(str(part) for part in parts if part)


def _status(job: JobSummary) -> str:
    return job.status if job.is_begun else "not finished"


def _strategy(job: JobSummary) -> str:
    """Return how tokens were chosen: strategy, temperature and number of samples, in a line."""
    sampling, name = job.group("sampling"), job.strategy_name
    names = [name] if name else []
    if sampling:
        greedy = not sampling.get("temperature")
        names.append("greedy" if greedy else f"temperature {sampling['temperature']:g}")
        if (until := sampling.get("until")) is None:
            names.append(f"{counted(sampling.get('n', 1), 'sample')} of each row")
        else:
            names.append(
                f"at most {until['most']:,} samples of each row until {enough_text(until)}"
            )
    return ", ".join(names)


def _warnings(job: JobSummary, data: JobData) -> list[str]:
    """Return warnings that a reader needs before trusting a number."""
    warnings = []
    if job.status != "complete":
        warnings.append(
            f"The job is not complete ({_status(job)}): this is about the rows that are done."
        )
    elif job.score is not None and data.grades is None:
        warnings.append("The grades do not belong to these rows: run `batchgen grade` again.")
    if why := job.attempt.get("batch_dependence"):
        warnings.append(f"A row's tokens may depend on the other rows of its batch: {why}.")
    if (cut := cut_remark(job.totals)) is not None:
        warnings.append(cut)
    return warnings


def _rows(attempt: Mapping[str, Any]) -> str:
    """Return how many rows an attempt finished, and how many of them it copied from older jobs."""
    copied = attempt.get("rows_copied", 0)
    return f"{attempt['rows']:,}" + (f" ({copied:,} copied)" if copied else "")


def _attempt(attempt: Mapping[str, Any]) -> tuple[str, ...]:
    """Return a line of the table of attempts: when it started, its host, device, status, rows,
    time, tokens per second and peak memory."""
    memory, device = attempt.get("memory"), ""
    if memory:
        total = memory.get("total")
        device = f"GPU, {total / 2**30:.0f} GiB" if total else "CPU"
    return (
        attempt["started"], attempt["host"], device, attempt["status"], _rows(attempt),
        duration(attempt["wall_s"]), f"{tokens_per_s(attempt):,.0f}",
        f"{attempt['peak_rss_mib']:,.0f} MiB",
    )  # fmt: skip


def renew_report(job: Path) -> None:
    """Make the report of a job again, if it has one, after its scores have changed."""
    if (job / REPORT).is_file():
        try_report(job)
