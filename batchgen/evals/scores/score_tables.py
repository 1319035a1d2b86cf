"""The scores of a job as rows of a table, for CSV and Markdown."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from batchgen.util.text.text_table import score_value

HEADER = ("subset", "metric", "value", "low", "high", "questions")


def score_rows(scores: Mapping[str, Any]) -> list[dict[str, Any]]:
    """A row for each metric of the job, and of its subsets: with the bounds of its 95% interval for
    new questions, and how many questions have a value."""
    found = list(_rows("", scores))
    for name, part in scores.get("subsets", {}).items():
        found += _rows(name, part)
    return found


def _rows(subset: str, scores: Mapping[str, Any]) -> Iterator[dict[str, Any]]:
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


def score_cells(scores: Mapping[str, Any]) -> list[tuple[str, ...]]:
    """The same as texts, without rates, and what says no more than the score."""
    shown = score_value(scores)
    return [
        (
            row["subset"],
            row["metric"],
            *("" if row[key] is None else shown(row[key]) for key in ("value", "low", "high")),
            f"{row['questions']:,}",
        )
        for row in score_rows(scores)
        if "questions" in row and not row["metric"].endswith(("@1", "^1"))
    ]
