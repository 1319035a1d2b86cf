"""Scores as lines for people."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any

from batchgen.util.hidden import visible
from batchgen.util.shorten import both_ends

Line = tuple[str, str]
COUNT_AS = {"wrong": "counted as wrong", "left_out": "left out"}
"""What is said of texts that were cut, by the value of `score.cut_texts`."""
_NAME = 32
"""Characters of a subset's name, so that its line fits into 80 columns."""


def score_lines(scores: Mapping[str, Any]) -> list[Line]:
    """A name and a value for each line that tells what `batchgen.scoring.scores.score` found.

    The two intervals are of 95%: for new questions of the same kind, and for the same questions
    asked again. The second cannot be told where all samples of each question have one mark.
    """
    lines = [("score", _average(scores["avg"]))]
    lines += [(name, text) for name, text in _metrics(scores)]
    lines += _rates(scores)
    subsets = scores.get("subsets", {})
    for name, part in zip(_short(list(subsets)), subsets.values(), strict=True):
        average = part["avg"]
        count = f"{part['questions']:,} question{'s' * (part['questions'] != 1)}"
        lines.append((f"  {name}", f"{_percent(average['value'])}{_bounds(average)} of {count}"))
    return lines


def _short(names: Sequence[str]) -> list[str]:
    """Each name in one line of at most _NAME characters. Behind those that this makes equal stands
    their place."""
    lines = [" ".join(visible(name).split()) for name in names]
    shown = [both_ends(line, _NAME) for line in lines]
    often = Counter(shown)
    for place, line in enumerate(lines):
        if often[shown[place]] > 1:
            mark = f" #{place + 1}"
            shown[place] = both_ends(line, _NAME - len(mark)) + mark
    return shown


def table(lines: list[Line]) -> str:
    """The lines with their values in one column."""
    width = max(len(name) for name, _ in lines)
    return "\n".join(f"{name:<{width}}  {value}" for name, value in lines)


def _average(average: Mapping[str, Any]) -> str:
    text = _percent(average["value"])
    for name in ("population", "same_questions"):
        interval = average[name]
        if interval is None:
            continue
        what = {"population": "new"}.get(name, "same")
        told = _range(interval) if interval["low"] is not None else "cannot be told"
        text += f", {what} questions {told}"
    return text


def _metrics(scores: Mapping[str, Any]) -> list[Line]:
    """pass@k, pass^k and maj@k for each k over 1, where they say more than the average."""
    found = []
    for name, metric in scores.items():
        kind, _, k = name.replace("^", "@").partition("@")
        if k and k != "1" and kind in ("pass", "maj"):
            found.append((name, _percent(metric["value"]) + _bounds(metric)))
    return found


def _rates(scores: Mapping[str, Any]) -> list[Line]:
    """How many samples have no mark, and how many of the others have one to be careful with."""
    rates, of = scores["rates"], f"of {scores['samples']:,} answers"
    marked = f"no answer {_percent(rates['no_answer'])}, truncated {_percent(rates['truncated'])}"
    # Scores that earlier versions wrote do not say what cut texts count as, or have an answer.
    if rates["truncated"] and (counted := COUNT_AS.get(scores.get("cut_texts", ""))) is not None:
        marked += f" ({counted})"
    elif rates["truncated"] and (cut := rates.get("truncated_with_answer")) is not None:
        marked += f" (with an answer {_percent(cut)})"
    unmarked = f"error {_percent(rates['error'])}, grade error {_percent(rates['grade_error'])}"
    return [("marked", f"{marked} {of}"), ("not marked", f"{unmarked} {of}")]


def _bounds(metric: Mapping[str, Any]) -> str:
    interval = metric["population"]
    return "" if interval is None or interval["low"] is None else f" ({_range(interval)})"


def _range(interval: Mapping[str, float | None]) -> str:
    return f"{_percent(interval['low'])} to {_percent(interval['high'])}"


def _percent(value: float | None) -> str:
    return "–" if value is None else f"{100 * value:.1f}%"
