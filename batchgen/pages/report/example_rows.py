"""Chooses and renders the rows that a report shows, within its limit of bytes."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np
from markupsafe import Markup

from batchgen.pages.report.report_data import Collected
from batchgen.pages.report.report_rows import JobData
from batchgen.pages.rows.row_facts import RowFacts
from batchgen.pages.rows.row_page import PageLimits, RowPage
from batchgen.util.text.safe_text import shortened

_LEVELS = (
    PageLimits(text=20_000, tokens=600),
    PageLimits(text=6_000, tokens=240),
    PageLimits(text=2_000, tokens=80),
    PageLimits(text=600, tokens=0),
)
"""The limits for a row, from the most that is shown to the least; rows get lower levels if room is
short."""
_SMALL = 10_000  # a row whose HTML has fewer characters gets no lower levels
_LONGEST_ID = 100  # characters of a row's id
_KINDS = {
    "error": "errors", "ungraded": "not graded", "none": "no answer", "wrong": "wrong",
    "partly": "partly right", "cut": "cut", "constraint": "constraint violated", "right": "right",
    "disagreeing": "samples disagree", "longest": "longest", "random": "at random",
}  # fmt: skip
"""Kinds of rows, by class; the switches at the top of the rows choose among them."""
_FAULTS = tuple(_KINDS)[:7]
"""Kinds of rows with which something is wrong; the page shows these first, in this order."""


@dataclass(frozen=True)
class ExampleRow:
    """A row as the page shows it.

    Attributes:
        anchor: the row's HTML id.
        kinds: keys of _KINDS.
        gist: a short text in the row's heading.
        html: the content below the heading.
    """

    anchor: str
    row_id: Markup
    facts: RowFacts
    kinds: tuple[str, ...]
    gist: str
    html: Markup


@dataclass(frozen=True)
class ExampleRows:
    """The rows of a page.

    Attributes:
        dropped: how many rows were left out, because there was no room.
        cut: how many rows were shortened to make room for others.
    """

    rows: Sequence[ExampleRow]
    dropped: int
    cut: int

    @property
    def kinds(self) -> list[tuple[str, str, int]]:
        """The class, the name and the number of rows of each kind that applies to some of the rows,
        but not to all."""
        counts = Counter(kind for row in self.rows for kind in row.kinds)
        some = {kind: count for kind, count in counts.items() if count < len(self.rows)}
        return [(kind, name, some[kind]) for kind, name in _KINDS.items() if kind in some]

    @property
    def has_samples(self) -> bool:
        """Whether rows have several samples, so that each needs its number."""
        return any(row.facts.number for row in self.rows)

    def first(self, kind: str) -> str | None:
        """The id in the page of the first row of a kind; None if there is none."""
        return next((row.anchor for row in self.rows if kind in row.kinds), None)


@dataclass(frozen=True, slots=True)
class Fault:
    """How many answers have a fault, as in "3 could not be graded"."""

    kind: str  # a key of _KINDS
    text: str


def faults(report: Collected) -> list[Fault]:
    """Return the faults of a job's answers, in the order of the page."""
    seen = {reason: rows.seen for reason, rows in report.picked.items()}
    texts = {
        "error": (sum(report.errors.values()), "ended with an error"),
        "ungraded": (sum(report.grade_errors.values()), "could not be graded"),
        "none": (seen.get("no answer", 0), "in which no answer was found"),
        "wrong": (seen.get("wrong", 0), "wrong or partly wrong"),
        "cut": (report.reasons["length"], "cut at max_new_tokens"),
        "constraint": (seen.get("constraint", 0), "in which the constraint is violated"),
    }
    return [Fault(kind, f"{count:,} {text}") for kind, (count, text) in texts.items() if count]


def anchor(key: int) -> str:
    """Return the HTML id of a row, given its key (see `row_keys`)."""
    return f"row-{key >> 31}-{key & 0x7FFFFFFF}"


def shown_rows(data: JobData, page: RowPage, report: Collected, room: int) -> ExampleRows:
    """Read and render the chosen rows, which may have `room` bytes in all, at least 0."""
    reasons = report.chosen()
    variants: list[tuple[ExampleRow, list[Markup]]] = []
    for row, grades in data.chosen(np.array(list(reasons), np.int64)):
        facts, key = RowFacts(row, grades), (row["row_index"] << 31) | row["sample_index"]
        htmls = page.htmls(facts, key=anchor(key), limits=_LEVELS, enough=_SMALL)
        row_id, gist = shortened(facts.row_id, _LONGEST_ID), facts.gist(page.columns.text)
        kinds = _kinds(facts, reasons[key])
        variants.append((ExampleRow(anchor(key), row_id, facts, kinds, gist, Markup("")), htmls))
    sizes = [
        [len((example.row_id + html).encode()) for html in htmls] for example, htmls in variants
    ]
    levels, dropped = _fit(sizes, room)
    rows = [
        replace(example, html=htmls[level])
        for (example, htmls), level in zip(variants, levels, strict=True)
        if level is not None
    ]
    rows.sort(key=lambda row: _order(row.kinds))
    return ExampleRows(rows, dropped, sum(level is not None and level > 0 for level in levels))


def _order(kinds: Sequence[str]) -> int:
    """Return the sort key of a row: rows with worse faults come first."""
    return next((index for index, kind in enumerate(_FAULTS) if kind in kinds), len(_FAULTS))


def _kinds(facts: RowFacts, reasons: Sequence[str]) -> tuple[str, ...]:
    """Return the kinds of a row, as keys of _KINDS.

    They are some of the `reasons` to show it, and at most one kind for its outcome. A verdict has a
    name for people and a kind. The kind "none" means that the row has no mark, but the key "none"
    of _KINDS that no answer was found.
    """
    kinds = [reason for reason in ("disagreeing", "longest", "random") if reason in reasons]
    verdict = facts.verdict
    if facts.row["error"] is not None:
        kinds.append("error")
    elif facts.grade("grade_error") is not None:
        kinds.append("ungraded")
    elif verdict.kind != "none":
        kinds.append("none" if verdict.name == "no answer" else verdict.kind)
    if facts.finish_reason == "length":
        kinds.append("cut")
    if facts.constraint not in (None, "satisfied", "unconstrained", "error"):
        kinds.append("constraint")
    return tuple(kinds)


def _fit(sizes: Sequence[Sequence[int]], room: int) -> tuple[list[int | None], int]:
    """Return the level of each row (an index of _LEVELS) so that all rows fit into `room` bytes,
    and the number of rows that are left out. These have the level None.

    Until all fit, the largest row gets the next lower level, or is left out if it has the lowest. A
    row that is left out has 0 bytes, so it is not the largest while more than `room` are in use.

    Args:
        sizes: for each row, its bytes at each level.
        room: at least 0; if the rest of the page leaves none, `write_report` renders no rows.
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
