"""Scores as lines for people."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

Line = tuple[str, str]
_RATES = ("no_answer", "truncated", "error", "grade_error")


def score_lines(scores: Mapping[str, Any]) -> list[Line]:
    """A name and a value for each line that tells what `batchgen.scoring.score.score` found.

    The two intervals are of 95%: for new questions of the same kind, and for the same questions
    asked again.
    """
    lines = [("score", _average(scores["avg"]))]
    lines += [(name, text) for name, text in _metrics(scores)]
    lines.append(("not marked", _rates(scores)))
    for name, part in scores.get("subsets", {}).items():
        average = part["avg"]
        count = f"{part['questions']:,} question{'s' * (part['questions'] != 1)}"
        lines.append((f"  {name}", f"{_percent(average['value'])}{_bounds(average)} of {count}"))
    return lines


def table(lines: list[Line]) -> str:
    """The lines with their values in one column."""
    width = max(len(name) for name, _ in lines)
    return "\n".join(f"{name:<{width}}  {value}" for name, value in lines)


def _average(average: Mapping[str, Any]) -> str:
    text = _percent(average["value"])
    for name in ("population", "same_questions"):
        interval = average[name]
        if interval is not None and interval["low"] is not None:
            what = {"population": "new"}.get(name, "same")
            text += f", {what} questions {_range(interval)}"
    return text


def _metrics(scores: Mapping[str, Any]) -> list[Line]:
    """pass@k, pass^k and maj@k for each k over 1, where they say more than the average."""
    found = []
    for name, metric in scores.items():
        kind, _, k = name.replace("^", "@").partition("@")
        if k and k != "1" and kind in ("pass", "maj"):
            found.append((name, _percent(metric["value"]) + _bounds(metric)))
    return found


def _rates(scores: Mapping[str, Any]) -> str:
    rates = scores["rates"]
    shown = ", ".join(f"{name.replace('_', ' ')} {_percent(rates[name])}" for name in _RATES)
    return f"{shown} of {scores['samples']:,} answers"


def _bounds(metric: Mapping[str, Any]) -> str:
    interval = metric["population"]
    return "" if interval is None or interval["low"] is None else f" ({_range(interval)})"


def _range(interval: Mapping[str, float | None]) -> str:
    return f"{_percent(interval['low'])} to {_percent(interval['high'])}"


def _percent(value: float | None) -> str:
    return "–" if value is None else f"{100 * value:.1f}%"
