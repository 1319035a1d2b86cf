"""The scores of a job as rows of a table, for CSV and Markdown. `batchgen score` uses it.

    subset,metric,value,low,high,questions
    ,avg,0.61,0.58,0.64,500

The scores are mappings as `compute_scores` returns them.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from batchgen.storage.metrics.job_scores import JobScores
from batchgen.util.text.text_table import score_value

_HEADER = ("subset", "metric", "value", "low", "high", "questions")
_ADAPTER = "adapter"


def header(scores: JobScores) -> tuple[str, ...]:
    """The names of the columns."""
    return (_ADAPTER, *_HEADER) if scores.adapters else _HEADER


def score_table_rows(scores: JobScores) -> list[dict[str, Any]]:
    """A row for each metric of the job (or of each adapter) and of its subsets, with the bounds of
    the 95% interval for new questions, and the number of questions that have a value."""
    rows = [] if scores.score is None else list(_all_rows(scores.score))
    for name, values in scores.adapters.items():
        rows += [{_ADAPTER: name, **row} for row in _all_rows(values)]
    return rows


def _all_rows(scores: Mapping[str, Any]) -> Iterator[dict[str, Any]]:
    yield from _rows("", scores)
    for name, part in scores.get("subsets", {}).items():
        yield from _rows(name, part)


def _rows(subset: str, scores: Mapping[str, Any]) -> Iterator[dict[str, Any]]:
    """Yield the rows of a job or a subset: metrics, then rates, which have no interval."""
    for name, metric in scores.items():
        if not isinstance(metric, Mapping) or "population" not in metric:
            continue
        bounds = metric["population"] or {}
        yield {
            "subset": subset,
            "metric": scores.get("column", "score") if name == "avg" else name,
            "value": metric["value"],
            "low": bounds.get("low"),
            "high": bounds.get("high"),
            "questions": metric["questions"],
        }
    for name, rate in scores["rates"].items():
        yield {"subset": subset, "metric": name, "value": rate}
    if "chance" in scores:
        yield {"subset": subset, "metric": "chance", "value": scores["chance"]}


def score_cells(scores: JobScores) -> list[tuple[str, ...]]:
    """The values as texts, without rates and without metrics that equal the score."""
    some = scores.score or next(iter(scores.adapters.values()), {})
    as_text = score_value(some)
    return [
        (
            *(row[name] for name in header(scores) if name in (_ADAPTER, "subset", "metric")),
            *("" if row[key] is None else as_text(row[key]) for key in ("value", "low", "high")),
            f"{row['questions']:,}",
        )
        for row in score_table_rows(scores)
        if "questions" in row and not row["metric"].endswith(("@1", "^1"))
    ]
