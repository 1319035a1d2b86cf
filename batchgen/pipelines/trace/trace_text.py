"""Formats a trace as text for people, or as JSON values, for `batchgen trace`."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import asdict
from typing import Any

from batchgen.config.groups.adapter_names import ADAPTER
from batchgen.pages.rows.printed_rows import RowText, terminal_width
from batchgen.pipelines.trace.traced import (
    DropReason,
    Trace,
    TracedAnswers,
    TracedInSet,
    TracedLine,
    TracedSource,
    TraceItem,
)
from batchgen.util.shorten import wrapped
from batchgen.util.text.row_json import plain_text

# Columns that `RowText` shows in the heading of a row, or not at all.
_APART = ("row_id", "row_index", "sample_index", "finish_reason", "num_generated_tokens")
_KINDS = {
    TracedLine: "line",
    TracedAnswers: "answers",
    TracedInSet: "set",
    TracedSource: "data set",
    DropReason: "dropped",
}
_PLACES = ("_start", "_end")
"""The suffixes of grade columns that hold positions in the text."""
_INDENT = "  "
_LABEL = 24  # characters of the longest name that texts are aligned after
_LINES = 3  # of a text that is cut


def trace_lines(trace: Trace, *, whole: bool) -> Iterator[str]:
    """Yield the lines of a trace. With `whole`, long texts are not cut."""
    for number, origin in enumerate(trace.origins):
        if number:
            yield ""
        yield from _lines(origin, whole)


def _lines(origin: TraceItem, whole: bool) -> Iterator[str]:
    match origin:
        case TracedLine():
            yield f"{origin.file}, line {origin.line}"
            yield from _values(origin.content, whole)
        case TracedInSet():
            yield f"{origin.set}: row {origin.row['id']}"
            fields = {name: value for name, value in origin.row.items() if name != "id"}
            yield from _values(fields, whole)
        case TracedAnswers():
            yield from _answers(origin, whole)
        case TracedSource():
            yield f"{origin.data_set}: row {origin.row_index:,} (counted from 0)"
            if origin.file is not None and origin.row_in_file != origin.row_index:
                yield f"{_INDENT}{origin.file}: row {origin.row_in_file:,} of the file"
        case DropReason():
            yield f"{origin.where}: row {origin.row_id} is not there"
            yield f"{_INDENT}dropped by {origin.by}: {origin.reason}"


def _answers(answers: TracedAnswers, whole: bool) -> Iterator[str]:
    passed = f", passed {', '.join(answers.steps)}" if answers.steps else ""
    yield f"{answers.job}{passed}"
    for number, (row, grades) in enumerate(zip(answers.rows, answers.grades, strict=True)):
        columns = [name for name in row if name not in _APART]
        if number:  # all samples of a row have the same input columns, which are shown once
            columns = [name for name in columns if name in (ADAPTER, answers.text_column, "error")]
        text = RowText(columns, terminal_width(), answers.text_column, whole_texts=whole)
        yield from text.lines(row)
        grade_values = {f"grades.{n}": v for n, v in grades.items() if not n.endswith(_PLACES)}
        yield from _values(grade_values, whole)


def _values(values: Mapping[str, Any], whole: bool) -> Iterator[str]:
    present = {name: value for name, value in values.items() if value is not None}
    margin = min(max((len(name) for name in present), default=0), _LABEL) + 2
    room = max(20, terminal_width() - len(_INDENT) - margin)
    for name, value in present.items():
        texts = wrapped(plain_text(value), room, None if whole else _LINES)
        for number, text in enumerate(texts):
            yield f"{_INDENT}{'' if number else name:<{margin}}{text}".rstrip()


def trace_values(trace: Trace) -> list[dict[str, Any]]:
    """Return the trace as JSON values."""
    return [{"kind": _KINDS[type(origin)], **asdict(origin)} for origin in trace.origins]
