"""The rows that a report has: which, how much of each, and how they are found."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from markupsafe import Markup

from batchgen.folder.job_metrics import constraint_outcome
from batchgen.report.report_data import Collected
from batchgen.report.report_rows import JobData
from batchgen.report.row_page import Limits, RowPage, Verdict, verdict
from batchgen.texts.safe_text import shortened
from batchgen.util.shorten import beginning

_LEVELS = (Limits(20_000, 600), Limits(6_000, 240), Limits(2_000, 80), Limits(600, 0))
"""How much of a row is shown, from the most that there is room for down to the least."""
_SMALL = 10_000  # characters of a row that need not become fewer
_LONGEST_ID = 100
_GIST = 110  # characters of an answer in the heading
_KINDS = {
    "error": "errors", "ungraded": "not graded", "none": "no answer", "wrong": "wrong",
    "partly": "partly right", "cut": "cut", "constraint": "constraint not kept", "right": "right",
    "disagreeing": "samples disagree", "longest": "longest", "random": "at random",
}  # fmt: skip
"""Kinds of rows, by class; the switches at the top of the rows choose among them."""
_FAULTS = tuple(_KINDS)[:7]
"""Kinds of rows with which something is wrong; the page shows these first, in this order."""


@dataclass(frozen=True)
class ShownRow:
    """A row in the page.

    Attributes:
        anchor: its id.
        kinds: the keys of _KINDS that it belongs to.
        gist: the beginning of its answer.
        html: what is behind its heading.
    """

    anchor: str
    row_id: Markup
    sample: int
    kinds: tuple[str, ...]
    verdict: Verdict | None
    tokens: int
    finish_reason: str
    gist: str
    html: Markup


@dataclass(frozen=True)
class ShownRows:
    """The rows of a page.

    Attributes:
        dropped: how many rows had no room.
        cut: how many are shortened to make room for others.
        kinds: class, name and number of rows of each kind that there is.
    """

    rows: Sequence[ShownRow]
    dropped: int
    cut: int

    @property
    def kinds(self) -> list[tuple[str, str, int]]:
        """Those of all rows are left out: there is nothing to choose."""
        counts = Counter(kind for row in self.rows for kind in row.kinds)
        some = {kind: count for kind, count in counts.items() if count < len(self.rows)}
        return [(kind, name, some[kind]) for kind, name in _KINDS.items() if kind in some]

    @property
    def has_samples(self) -> bool:
        """Whether rows have several samples, so that each needs its number."""
        return any(row.sample for row in self.rows)

    def first(self, kind: str) -> str | None:
        """The id in the page of the first row of a kind; None if there is none."""
        return next((row.anchor for row in self.rows if kind in row.kinds), None)


@dataclass(frozen=True, slots=True)
class Fault:
    """How many answers of a job have something wrong with them.

    Attributes:
        kind: the key of _KINDS that they belong to.
        text: the number and what is wrong, as in "3 could not be graded".
    """

    kind: str
    text: str


def faults(found: Collected) -> list[Fault]:
    """What is wrong with the answers of a job, the kinds that come first in its page first."""
    seen = {reason: rows.seen for reason, rows in found.picked.items()}
    said = {
        "error": (sum(found.errors.values()), "ended with an error"),
        "ungraded": (sum(found.grade_errors.values()), "could not be graded"),
        "none": (seen.get("no answer", 0), "without an answer that was found"),
        "wrong": (seen.get("wrong", 0), "wrong or partly wrong"),
        "cut": (found.reasons["length"], "cut at their longest length"),
        "constraint": (seen.get("constraint", 0), "not within their constraint"),
    }
    return [Fault(kind, f"{count:,} {text}") for kind, (count, text) in said.items() if count]


def _order(kinds: Sequence[str]) -> int:
    """The place of a row among the others: the worse, the earlier."""
    return next((place for place, kind in enumerate(_FAULTS) if kind in kinds), len(_FAULTS))


def anchor(key: int) -> str:
    """The id of a row in the page, given its key as of `row_keys`."""
    return f"row-{key >> 31}-{key & 0x7FFFFFFF}"


def shown_rows(data: JobData, page: RowPage, found: Collected, room: int) -> ShownRows:
    """Read and render the chosen rows.

    Args:
        room: bytes that they may have together.

    Raises:
        JobError: a file is damaged.
    """
    reasons = found.chosen()
    variants: list[tuple[dict[str, Any], list[Markup]]] = []
    for row, grades in data.chosen(np.array(list(reasons), np.int64)):
        key = (row["row_index"] << 31) | row["sample_index"]
        heading = _heading(page, row, grades, key, reasons[key])
        made = page.htmls(row, grades, key=heading["anchor"], limits=_LEVELS, enough=_SMALL)
        variants.append((heading, made))
    sizes = [[len((heading["row_id"] + h).encode()) for h in made] for heading, made in variants]
    levels, dropped = _fit(sizes, room)
    rows = [
        ShownRow(**heading, html=made[level])
        for (heading, made), level in zip(variants, levels, strict=True)
        if level is not None
    ]
    rows.sort(key=lambda row: _order(row.kinds))
    return ShownRows(rows, dropped, sum(bool(level) for level in levels))


def _heading(
    page: RowPage,
    row: Mapping[str, Any],
    grades: Mapping[str, Any] | None,
    key: int,
    reasons: Sequence[str],
) -> dict[str, Any]:
    """The fields of a ShownRow but its HTML."""
    found = verdict(row, grades)
    return {
        "anchor": anchor(key),
        "row_id": shortened(row["row_id"], _LONGEST_ID),
        "sample": row["sample_index"],
        "kinds": _kinds(row, grades, found, reasons),
        "verdict": found,
        "tokens": row["num_generated_tokens"],
        "finish_reason": row["finish_reason"],
        "gist": _gist(row, grades or {}, page.text_column),
    }


def _gist(row: Mapping[str, Any], grades: Mapping[str, Any], text_column: str) -> str:
    """What a row came to in a line: its error, its answer beside the right one, or its text."""
    if row["error"] is not None:
        return beginning(row["error"]["message"], _GIST)
    answer, target = grades.get("answer"), grades.get("graded_against")
    if answer is None:
        return beginning(row[text_column] or "", _GIST)
    text = beginning(str(answer), _GIST)
    wrong = target is not None and grades.get("mark") == 0
    return f"{text}  (right is {beginning(str(target), _GIST)})" if wrong else text


def _kinds(
    row: Mapping[str, Any],
    grades: Mapping[str, Any] | None,
    found: Verdict | None,
    reasons: Sequence[str],
) -> tuple[str, ...]:
    kinds = [reason for reason in ("disagreeing", "longest", "random") if reason in reasons]
    if row["error"] is not None:
        kinds.append("error")
    elif (grades or {}).get("grade_error") is not None:
        kinds.append("ungraded")
    elif found is not None:
        kinds.append("none" if found.name == "no answer" else found.kind)
    if row["finish_reason"] == "length":
        kinds.append("cut")
    kept = row.get("constraint_satisfied")
    if kept is not None and constraint_outcome(row["finish_reason"], kept) != "satisfied":
        kinds.append("constraint")
    return tuple(kinds)


def _fit(sizes: Sequence[Sequence[int]], room: int) -> tuple[list[int | None], int]:
    """The level of each row so that all have room together; None for a row that has none.

    The largest row is made smaller, again and again, or left out if it is at its lowest level.

    Args:
        sizes: for each row its bytes at each level.

    Returns:
        The levels, and how many rows were left out.
    """
    levels: list[int | None] = [0] * len(sizes)
    now = [row[0] for row in sizes]
    while sum(now) > room:
        largest = int(np.argmax(now))
        level = levels[largest]
        assert level is not None
        lower = level + 1
        levels[largest] = lower if lower < len(sizes[largest]) else None
        now[largest] = sizes[largest][lower] if lower < len(sizes[largest]) else 0
    return levels, sum(level is None for level in levels)
