"""Formats a table of arms as plain values, lines for the terminal, Markdown and CSV, for `batchgen
compare` and reports. An *arm* is one line of the table: a job, or jobs that differ only in their
seed.

    arm        score             95%  difference            95%        p  differs in
    A  first   56.6%  52.2% to 60.9%                                      temperature=0
    B  second  69.4%  65.2% to 73.3%       +12.8  +6.5 to +19.0  < 0.001  temperature=0.7
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import asdict
from string import ascii_uppercase
from typing import Any

from batchgen.evals.arms.arm_table import ArmRow, ArmTable
from batchgen.evals.graders.step import MARK
from batchgen.evals.scores.compared_jobs import bound_text, difference, p_value
from batchgen.evals.scores.intervals import Interval
from batchgen.util.shorten import both_ends, short_name
from batchgen.util.text.data_tables import csv_text
from batchgen.util.text.text_table import columns, counted, number_text, percent_text

_DIFFERS = "differs in"
_NAME_WIDTH, _SETTINGS_WIDTH = 40, 60
"""The most characters in a line of an arm's name, and of its settings."""


def letter(index: int) -> str:
    """The short label of an arm: A, B, … Z, then 27 and so on."""
    return ascii_uppercase[index] if index < len(ascii_uppercase) else str(index + 1)


def table_values(table: ArmTable, x: str | None = None) -> dict[str, Any]:
    """Everything in a table as JSON values; `x` adds a metric of each arm."""
    return {
        "column": table.column,
        "first": None if table.first is None else table.first.arm.name,
        "tests": table.tests,
        "arms": [_plain(_row_values(row, x)) for row in table.rows],
    }


def _row_values(row: ArmRow, x: str | None) -> dict[str, Any]:
    """An arm in `table_values`."""
    arm = row.arm
    values = {
        "name": arm.name,
        "folders": list(arm.folders),
        "seeds": list(arm.seeds),
        "settings": dict(arm.settings),
        **({} if x is None else {x: arm.number(x)}),
        "questions": row.questions,
        "answers": row.answers,
        "score": None if row.score is None else asdict(row.score),
        "difference": None if row.difference is None else asdict(row.difference),
        "shared_questions": row.shared,
        "p": row.p,
        "p_holm": row.p_holm,
        "without": arm.without,
        "other_exam": arm.other_exam,
    }
    if row.comparison is not None:
        values["comparison"] = asdict(row.comparison)
    return values


def _plain(value: Any) -> Any:
    """The value with null for NaN, which JSON lacks."""
    if isinstance(value, dict):
        return {key: _plain(item) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [_plain(item) for item in value]
    return None if isinstance(value, float) and math.isnan(value) else value


Cells = list[tuple[str, ...]]


def table_cells(table: ArmTable, x: str | None = None) -> Cells:
    """A header, and a row of texts for each arm. Columns that no arm fills are left out."""
    header = (
        "arm",
        "score",
        "95%",
        "difference",
        "95%",
        "p",
        *([] if x is None else [x]),
        _DIFFERS,
    )
    rows = [
        (
            f"{letter(index)}  {both_ends(shown_name(table, row), _NAME_WIDTH)}",
            _value(table, row.score),
            _bounds(table, row.score),
            _difference(table, row.difference),
            _difference_bounds(table, row.difference),
            "" if row.p_holm is None or math.isnan(row.p_holm) else _p(row.p_holm),
            *([] if x is None else [number_text(row.arm.number(x))]),
            _differing_text(row),
        )
        for index, row in enumerate(table.rows)
    ]
    kept = [i for i in range(len(header)) if i == 0 or any(row[i] for row in rows)]
    return [tuple(row[i] for i in kept) for row in [header, *rows]]


def shown_name(table: ArmTable, row: ArmRow) -> str:
    """The name of an arm for people. The settings in the name of a sweep's job get short keys."""
    settings = row.arm.settings
    short = {short_key(key) for key in table.differing}
    # Without settings in the name there is nothing to shorten, and two keys with one short form
    # could not be told apart.
    if not settings or len(short) < len(table.differing) or not _names_settings(row):
        return row.arm.name
    return ", ".join(f"{short_key(key)}={value}" for key, value in settings.items())


def _names_settings(row: ArmRow) -> bool:
    """Whether an arm's name contains its settings."""
    arm = row.arm
    return all(f"{key}={value}" in arm.name for key, value in arm.settings.items())


def table_lines(table: ArmTable, x: str | None = None) -> list[str]:
    """The table for the terminal, with the remarks that are needed to read it."""
    cells = table_cells(table, x)
    if cells[0][-1] != _DIFFERS:  # an empty last column keeps the numbers aligned on the right
        cells = [(*row, "") for row in cells]
    return [*columns(cells), "", *table_remarks(table)]


def table_remarks(table: ArmTable) -> list[str]:
    """The remarks that are needed to read the table, one sentence each."""
    first = table.first
    if first is None:
        remarks = []
    else:
        what = "marks" if table.column == MARK else table.column
        names = {id(row): letter(index) for index, row in enumerate(table.rows)}
        remarks = [
            f"Scores are means of {what} over {counted(first.questions, 'question')}; intervals "
            "are of 95%, for new questions."
        ]
        if table.tests:
            points = " in points" if table.column == MARK else ""
            remarks.append(
                f"Differences are from {names[id(first)]}{points}; p is corrected by Holm for "
                f"{counted(table.tests, 'test')}: below 0.05, chance is an unlikely cause."
            )
    arms: dict[str, list[str]] = {}
    for index, row in enumerate(table.rows):
        for text in _row_remarks(row, first):
            arms.setdefault(text, []).append(letter(index))
    return [*remarks, *(f"{', '.join(letters)}: {text}" for text, letters in arms.items())]


def _row_remarks(row: ArmRow, first: ArmRow | None) -> list[str]:
    """The remarks on one arm."""
    arm, remarks = row.arm, []
    if arm.without:
        remarks.append(f"has no score: {arm.without}")
    if arm.other_exam:
        how = "compared anyway" if arm.anyway else "and is not compared"
        remarks.append(f"took a different exam, {how}: {arm.other_exam}")
    if arm.seeds:
        remarks.append(f"averaged over sampling.seed {', '.join(arm.seeds)}")
    if first is None or row.difference is None:
        return remarks
    if row.comparison is None:
        remarks.append("shares no question with the first: the difference is not paired")
    elif row.shared < max(row.questions, first.questions):
        remarks.append(
            f"paired over the {counted(row.shared, 'question')} that both have, of "
            f"{row.questions:,} here and {first.questions:,} there"
        )
    return remarks


def _p(value: float) -> str:
    return p_value(value).removeprefix("= ")


def _value(table: ArmTable, score: Interval | None) -> str:
    return "–" if score is None else shown_value(table.column)(score.estimate)


def shown_value(column: str) -> Callable[[float | None], str]:
    """The function that formats values of a column: marks in percent, other numbers unchanged."""
    return percent_text if column == MARK else number_text


def _bounds(table: ArmTable, score: Interval | None) -> str:
    if score is None or math.isnan(score.low):
        return ""
    as_text = shown_value(table.column)
    return f"{as_text(score.low)} to {as_text(score.high)}"


def _difference(table: ArmTable, interval: Interval | None) -> str:
    return "" if interval is None else difference(interval.estimate, table.column)


def _difference_bounds(table: ArmTable, interval: Interval | None) -> str:
    if interval is None or math.isnan(interval.low):
        return ""
    return f"{bound_text(interval.low, table.column)} to {bound_text(interval.high, table.column)}"


def _differing_text(row: ArmRow) -> str:
    """The settings in which an arm differs, unless its name contains them."""
    if row.score is None:
        return "no score"
    if _names_settings(row) or row.arm.name in row.arm.settings.values():
        return ""
    settings = row.arm.settings.items()
    texts = [f"{short_key(key)}={_short_value(key, value)}" for key, value in settings]
    kept = [
        text for at, text in enumerate(texts) if len(", ".join(texts[: at + 1])) <= _SETTINGS_WIDTH
    ]
    kept = kept or [both_ends(texts[0], _SETTINGS_WIDTH)]
    more = len(texts) - len(kept)
    return ", ".join(kept) + (f" and {more} more" if more else "")


def _short_value(key: str, value: str) -> str:
    return short_name(value) if key in ("model.path", "dataset.path") else value


def short_key(key: str) -> str:
    """The last part of a key; for the path of a model, and for classes, the group."""
    return "model" if key == "model.path" else key.removesuffix("._target_").rpartition(".")[2]


def table_csv(table: ArmTable, x: str | None = None) -> str:
    """The table as CSV with all digits: a line for each arm."""
    rows = []
    for values in table_values(table, x)["arms"]:
        score, change = values["score"] or {}, values["difference"] or {}
        settings: Mapping[str, str] = values["settings"]
        rows.append(
            {
                "arm": values["name"],
                "score": score.get("estimate"),
                "low": score.get("low"),
                "high": score.get("high"),
                "difference": change.get("estimate"),
                "difference_low": change.get("low"),
                "difference_high": change.get("high"),
                **{key: values[key] for key in ("p", "p_holm", "questions", "answers")},
                **({} if x is None else {x: values[x]}),
                **settings,
                "seeds": " ".join(values["seeds"]),
                "folders": " ".join(values["folders"]),
                "without": values["without"],
                "other_exam": values["other_exam"],
            }
        )
    return csv_text(list(dict.fromkeys(name for row in rows for name in row)), rows)
