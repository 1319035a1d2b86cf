"""Prepares the overview page of a job in `batchgen view`. `overview` reads no rows."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from batchgen.config.groups.dataset_config import dataset_name
from batchgen.pages.viewer.job_view import JobView
from batchgen.pages.viewer.rows.filters import MARKS
from batchgen.storage.folder.job_summary import JobSummary, until_line
from batchgen.storage.shards.enough import enough_text
from batchgen.util.duration import duration
from batchgen.util.text.text_table import Line, answers_text, score_lines, score_value, value_range

Query = Mapping[str, str]
"""The keys of a URL that describe a filter of rows."""
_SAMPLING = ("n", "temperature", "top_p", "max_new_tokens", "seed")


@dataclass(frozen=True)
class Count:
    """A number of answers, and the filter that lists those answers."""

    name: str
    number: int
    share: float  # of all answers
    query: Query


@dataclass(frozen=True)
class Subset:
    """The score of one subset of the questions."""

    name: str
    questions: int
    value: str  # the mean mark
    interval: str  # the 95% confidence interval, for a new sample of questions
    query: Query | None  # the filter that lists the subset; None if no column names the subsets


@dataclass(frozen=True)
class Overview:
    """The content of a job's overview page. Lists are empty if the job lacks their data.

    Attributes:
        reasons: the answers by finish reason.
        errors: the error rows by type of error.
        marks: the name of each mark with the filter that lists its answers.
        missing: sentences about what the job lacks.
    """

    job: JobView
    status: str
    facts: list[Line]
    scores: list[Line]
    subsets: list[Subset]
    reasons: list[Count]
    errors: list[Count]
    marks: list[tuple[str, Query]]
    missing: list[str]


def overview(job: JobView) -> Overview:
    """Collect the facts of a job's overview page."""
    summary = JobSummary.of(job.metrics, job.config, questions=job.num_rows)
    return Overview(
        job,
        _status(summary),
        _facts(job, summary),
        [] if summary.score is None else score_lines({**summary.score, "subsets": {}}),
        _subsets(job),
        _counts(summary, summary.totals.finish_reasons, "reason"),
        _counts(summary, summary.totals.errors, "error"),
        [(name, {"mark": mark}) for mark, name in MARKS.items()] if job.rows.grade_names else [],
        job.missing(),
    )


def _status(job: JobSummary) -> str:
    """Describe the job's state and progress in words."""
    if not job.is_begun:
        return "not begun, or killed before its first ten seconds"
    amount = answers_text(job.questions, job.totals.rows)
    if (total := rows_to_come(job)) is not None:
        amount = f"{job.totals.rows:,} of {total:,} answers"
    text = f"{job.status}, {amount}"
    is_fine = job.status in ("complete", "running")
    return text if is_fine else f"{text} (the command resumes it)"


def rows_to_come(job: JobSummary) -> int | None:
    """Return the number of answers that an incomplete job will have in the end; None for a complete
    job, or if unknown."""
    return None if job.status == "complete" else job.rows_total


def _counts(job: JobSummary, counts: Mapping[str, int], key: str) -> list[Count]:
    """Return the counts in descending order, each with the filter `key`=name."""
    return [
        Count(name, number, number / max(job.totals.rows, 1), {key: name})
        for name, number in sorted(counts.items(), key=lambda item: -item[1])
    ]


def _subsets(job: JobView) -> list[Subset]:
    subsets = []
    for name, part in job.subsets.items():
        as_text, average = score_value(part), part["avg"]
        interval = value_range(average["population"], as_text)
        query = {"subset": name} if job.subset_column else None
        subsets.append(Subset(name, part["questions"], as_text(average["value"]), interval, query))
    return subsets


def _sampling(sampling: Mapping[str, Any]) -> Iterator[str]:
    """Yield the sampling settings in words."""
    until = sampling.get("until")
    if until is not None:
        yield f"until {enough_text(until)} (at most {until['most']:,}): {until['where']}"
    names = _SAMPLING if until is None else _SAMPLING[1:]
    yield from (f"{name} {sampling[name]}" for name in names if name in sampling)


def _facts(job: JobView, summary: JobSummary) -> list[Line]:
    """Return the facts about the job as (name, text); facts without a value are left out."""
    dataset, sampling, attempt = (
        summary.group("dataset"),
        summary.group("sampling"),
        summary.attempt,
    )
    facts = [
        ("folder", str(job.path)),
        ("model", str(summary.group("model").get("path"))),
        ("data set", dataset_name(dataset)),
        ("strategy", summary.strategy_name),
        ("sampling", ", ".join(_sampling(sampling))),
    ]
    if (until := until_line(summary)) is not None:
        facts.append(("until enough", until))
    if summary.is_begun:
        read, written = summary.totals.prompt_tokens, summary.totals.generated_tokens
        facts.append(("tokens", f"{read:,} read, {written:,} written"))
        facts.append(("speed", f"{summary.tokens_per_s:,.0f} tokens/s"))
    if attempt.get("wall_s"):
        facts.append(("time", f"{duration(attempt['wall_s'])} (last run of the command)"))
    if summary.cost is not None:
        facts.append(("device", summary.cost))
    if attempt.get("started"):
        facts.append(("begun", str(attempt["started"])))
    return [(name, text) for name, text in facts if text not in ("None", "")]
