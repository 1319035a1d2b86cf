"""Formats tables, numbers and scores as lines of text, for reports, messages and the viewer."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from batchgen.util.hidden import visible
from batchgen.util.shorten import both_ends

Line = tuple[str, str]
"""The name and the value in a line of a table."""
COUNT_AS = {"wrong": "counted as wrong", "left_out": "left out"}
"""Value of `score.cut_texts` → what it means for truncated texts, in words."""
_NAME = 32
"""The most characters of a subset's name, so that its line fits into 80 columns."""
_UNKNOWN = {
    "new": "unknown (it needs two questions)",
    "same": "unknown (all samples of a question agree)",
}
"""Interval → why it is unknown."""


def table_text(*parts: Sequence[Line]) -> str:
    """Format parts of a table of names and values. All values begin in the same column, and an
    empty line separates the parts."""
    width = max(len(name) for part in parts for name, _ in part)
    lines = [
        "\n".join(f"{name:<{width}}  {value}" for name, value in part) for part in parts if part
    ]
    return "\n\n".join(lines)


def columns(rows: Sequence[Sequence[str]], *, numbers: bool = True) -> list[str]:
    """Format rows of texts as aligned columns, one line per row. The first and the last column are
    left-aligned; those between are right-aligned if they are `numbers`."""
    *widths, _ = (max(map(len, column)) for column in zip(*rows, strict=True))
    side = ">" if numbers else "<"
    lines = []
    for first, *between, last in rows:
        cells = [f"{text:{side}{w}}" for text, w in zip(between, widths[1:], strict=True)]
        lines.append("  ".join([f"{first:<{widths[0]}}", *cells, last]).rstrip())
    return lines


def counted(number: int, noun: str) -> str:
    """Return a number of things in words, such as `1 error` and `2 errors`."""
    return f"{number:,} {noun}{'s' * (number != 1)}"


def answers_text(questions: int | None, answers: int) -> str:
    """Return `20 questions, 160 answers`, or only the answers if the number of questions is
    unknown."""
    parts = [] if questions is None else [counted(questions, "question")]
    return ", ".join([*parts, counted(answers, "answer")])


def row_name(row_id: str, sample_index: int) -> str:
    """Return `row ID`, followed by the number of the sample unless it is the first."""
    return f"row {row_id}" + (f", sample {sample_index}" if sample_index else "")


def size_text(number: float) -> str:
    """Return a number of bytes in words, such as `1.5 MB`."""
    for unit in ("B", "KB", "MB", "GB"):
        if number < 1000:
            return f"{number:,.0f} {unit}" if unit == "B" else f"{number:,.3g} {unit}"
        number /= 1000
    return f"{number:,.3g} TB"


def percent_text(share: float | None) -> str:
    return "–" if share is None else f"{100 * share:.1f}%"


def score_value(scores: Mapping[str, Any]) -> Callable[[float | None], str]:
    """Return the function that formats values of these scores: marks in percent, other numbers
    unchanged."""
    return number_text if "column" in scores else percent_text


def number_text(value: float | None) -> str:
    """Format a number with four significant digits."""
    return "–" if value is None else f"{value:,.4g}" if abs(value) < 10_000 else f"{value:,.0f}"


def value_range(
    interval: Mapping[str, Any] | None, format_value: Callable[[float | None], str]
) -> str:
    """Format an interval, such as `40.0% to 60.0%`; empty if it is unknown."""
    if interval is None or interval["low"] is None:
        return ""
    return f"{format_value(interval['low'])} to {format_value(interval['high'])}"


def score_lines(scores: Mapping[str, Any]) -> list[Line]:
    """Return lines (name, value) for the scores of `batchgen.evals.scores.scores.compute_scores`.

    The average has two 95% intervals: for new questions of the same kind, and for the same
    questions asked again. The second is unknown if all samples of each question have the same mark.
    """
    as_text = score_value(scores)
    lines = [(scores.get("column", "score"), _average(scores["avg"], as_text))]
    if (chance := scores.get("chance")) is not None:
        lines.append(("chance", f"{percent_text(chance)} of random guesses would be right"))
    if (bounds := scores.get("range")) is not None:
        low, high = map(as_text, bounds)
        lines.append(("range", f"{low} to {high}"))
    lines += [*_metrics(scores), *_rates(scores)]
    subsets = scores.get("subsets", {})
    for name, part in zip(_short(list(subsets)), subsets.values(), strict=True):
        value = f"{as_text(part['avg']['value'])}{_bounds(part['avg'], as_text)}"
        lines.append((f"  {name}", f"{value} of {counted(part['questions'], 'question')}"))
    return lines


def adapter_lines(adapters: Mapping[str, Mapping[str, Any]]) -> list[Line]:
    """Return a line with the score of each adapter."""
    return [
        (f"{scores.get('column', 'score')} {name}", _average(scores["avg"], score_value(scores)))
        for name, scores in adapters.items()
    ]


def _short(names: Sequence[str]) -> list[str]:
    """Shorten each name to one line of at most _NAME characters. Names that become equal get their
    number at the end."""
    lines = [" ".join(visible(name).split()) for name in names]
    texts = [both_ends(line, _NAME) for line in lines]
    often = Counter(texts)
    for index, line in enumerate(lines):
        if often[texts[index]] > 1:
            mark = f" #{index + 1}"
            texts[index] = both_ends(line, _NAME - len(mark)) + mark
    return texts


def _average(average: Mapping[str, Any], format_value: Callable[[float | None], str]) -> str:
    text = format_value(average["value"])
    for name, what in (("population", "new"), ("same_questions", "same")):
        if (interval := average[name]) is not None:
            text += f", {what} questions {value_range(interval, format_value) or _UNKNOWN[what]}"
    return text


def _metrics(scores: Mapping[str, Any]) -> list[Line]:
    """Return lines for pass@k, pass^k and maj@k with k > 1."""
    lines = []
    for name, metric in scores.items():
        kind, _, k = name.replace("^", "@").partition("@")
        if k and k != "1" and kind in ("pass", "maj"):
            value = percent_text(metric["value"]) + _bounds(metric)
            lines.append((name, value if metric["value"] is not None else _too_few(k)))
    return lines


def _too_few(k: str) -> str:
    return f"– (no question has {k} answers: raise sampling.n)"


def _rates(scores: Mapping[str, Any]) -> list[Line]:
    """Return lines for the shares of samples without a mark, and of samples whose mark may
    mislead."""
    rates, of = scores["rates"], f"of {counted(scores['samples'], 'answer')}"
    shares = f"{percent_text(rates['no_answer'])} no answer found"
    shares += f", {percent_text(rates['truncated'])} truncated"
    # Scores of earlier versions lack `cut_texts` or `truncated_with_answer`.
    if rates["truncated"] and (meaning := COUNT_AS.get(scores.get("cut_texts", ""))) is not None:
        shares += f" ({meaning})"
    elif rates["truncated"] and (cut := rates.get("truncated_with_answer")) is not None:
        shares += f" ({percent_text(cut)} of all have an answer)"
    unmarked = (
        f"{percent_text(rates['error'])} error, {percent_text(rates['grade_error'])} grade error"
    )
    return [(of, shares), ("not marked", unmarked)]


def _bounds(
    metric: Mapping[str, Any], format_value: Callable[[float | None], str] = percent_text
) -> str:
    bounds = value_range(metric["population"], format_value)
    return f" ({bounds})" if bounds else ""
