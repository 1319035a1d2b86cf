"""What the first page says of a job."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from batchgen.util.duration import duration
from batchgen.viewer.job_view import JobView, attempt_of
from batchgen.viewer.rows.filters import MARKS


@dataclass(frozen=True)
class Count:
    """How many answers are such.

    Attributes:
        name: what they are.
        share: of all answers.
        query: the keys of the filter that lists them.
    """

    name: str
    number: int
    share: float
    query: Mapping[str, str]


@dataclass(frozen=True)
class Subset:
    """The score of a part of the exam.

    Attributes:
        value: the mean mark; None if nothing is marked.
        interval: of 95%, for new questions, in words; empty if there is none.
        query: the keys of the filter that lists its rows; None where rows do not name their subset.
    """

    name: str
    questions: int
    value: float | None
    interval: str
    query: Mapping[str, str] | None


@dataclass(frozen=True)
class Overview:
    """One job on the first page.

    Attributes:
        facts: what was run, by name.
        status: how far the job is.
        scores: lines of its scores; empty without.
        subsets: the scores of the parts of the exam.
        reasons, errors: how answers ended.
        marks: names and queries of the filters by mark; empty without grades.
        missing: what the job lacks that pages could show.
    """

    job: JobView
    status: str
    facts: list[tuple[str, str]]
    scores: list[tuple[str, str]]
    subsets: list[Subset]
    reasons: list[Count]
    errors: list[Count]
    marks: list[tuple[str, Mapping[str, str]]]
    missing: list[str]


def overview(job: JobView) -> Overview:
    """What is known of a job without reading its rows."""
    metrics = job.metrics
    total = metrics.get("rows", 0)
    return Overview(
        job,
        status_text(metrics),
        _facts(job, metrics),
        job.scores,
        _subsets(job),
        _counts(metrics.get("finish_reasons") or {}, total, "reason"),
        _counts(metrics.get("errors") or {}, total, "error"),
        [(name, {"mark": mark}) for mark, name in MARKS.items()] if job.rows.grade_names else [],
        job.missing(),
    )


def _counts(counts: Mapping[str, int], total: int, key: str) -> list[Count]:
    return [
        Count(name, number, number / max(total, 1), {key: name})
        for name, number in sorted(counts.items(), key=lambda item: -item[1])
    ]


def _subsets(job: JobView) -> list[Subset]:
    found = []
    for name, part in job.subsets.items():
        bounds = part["avg"]["population"] or {}
        low, high = bounds.get("low"), bounds.get("high")
        interval = ""
        if low is not None and high is not None:
            interval = f"{100 * low:.1f}% to {100 * high:.1f}%"
        query = {"subset": name} if job.subset_column else None
        found.append(Subset(name, part["questions"], part["avg"]["value"], interval, query))
    return found


def status_text(metrics: Mapping[str, Any]) -> str:
    """How far the job is. The counts of one that runs may be ten seconds old."""
    if not metrics:
        return "not begun, or killed before its first ten seconds"
    status, total = metrics["status"], rows_total(metrics)
    of = "" if total is None else f" of {total:,}"
    text = f"{status}, {metrics['rows']:,}{of} answers"
    return text if status in ("complete", "running") else f"{text} (the command goes on from there)"


def rows_total(metrics: Mapping[str, Any]) -> int | None:
    """How many answers a job that is not complete will have; None if that is not known."""
    if metrics["status"] == "complete":
        return None
    total: int | None = attempt_of(metrics).get("rows_total")
    return total


def _facts(job: JobView, metrics: Mapping[str, Any]) -> list[tuple[str, str]]:
    config, attempt = job.config, attempt_of(metrics)
    model, dataset = config.get("model") or {}, config.get("dataset") or {}
    sampling, strategy = config.get("sampling") or {}, config.get("strategy") or {}
    facts = [
        ("folder", str(job.path)),
        ("model", str(model.get("path"))),
        ("data set", str(dataset.get("path") or dataset.get("kind"))),
        ("strategy", str(strategy.get("_target_", "")).rpartition(".")[2]),
        ("sampling", ", ".join(f"{k} {sampling[k]}" for k in _SAMPLING if k in sampling)),
    ]
    if metrics:
        facts += [
            (
                "tokens",
                f"{metrics['prompt_tokens']:,} read, {metrics['generated_tokens']:,} written",
            ),
            ("speed", f"{metrics['tokens_per_s'] or 0:,.0f} tokens/s"),
        ]
    if attempt.get("wall_s"):
        facts.append(("time", f"{duration(attempt['wall_s'])} (last run of the command)"))
    if attempt.get("started"):
        facts.append(("begun", str(attempt["started"])))
    return [(name, text) for name, text in facts if text not in ("None", "")]


_SAMPLING = ("n", "temperature", "top_p", "max_new_tokens", "seed")
