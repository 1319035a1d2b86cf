"""Prepares a page of the viewer's list of rows: filtered and sorted, for one job or two."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any

from batchgen.pages.rows.grade_columns import PREFIX
from batchgen.pages.rows.row_facts import RowFacts, same_sample
from batchgen.pages.viewer.job_view import JobView, Vote, votes
from batchgen.pages.viewer.rows.filters import MARKS, REASONS, SampleFilter, text_columns
from batchgen.pages.viewer.rows.ranking import MOST, ORDERS, order_text, orders
from batchgen.pages.viewer.rows.search import Search
from batchgen.util.shorten import beginning
from batchgen.util.text.row_json import plain_text

PER_PAGE = 50
_SHOWN = ("row_id", "finish_reason", "error", "num_generated_tokens")
_GRADES_SHOWN = ("mark", "answer", "answer_key", "graded_against", "grade_error")
_ASKED = 240  # characters of a column of the prompt


@dataclass(frozen=True)
class Line:
    """A row in a list. Its texts are shortened."""

    index: int
    prompt_columns: dict[str, str]  # the columns of its prompt
    jobs: list[list[RowFacts]]  # the samples of each job; none where it lacks the row
    matching: list[int]  # which samples of the first job the filter lists
    note: str = ""  # what a sorted list is sorted by

    @property
    def row_id(self) -> str:
        return self.jobs[0][0].row_id

    def shown(self, job: int) -> RowFacts | None:
        """The sample whose text is shown."""
        return same_sample(self.jobs[job], self.matching[0])

    def votes(self, job: int) -> list[Vote]:
        """The answers of a job to the question."""
        return votes(self.jobs[job])

    @property
    def target(self) -> str | None:
        """The target with which the answers were compared."""
        targets = (s.grade("graded_against") for samples in self.jobs for s in samples)
        return next((str(target) for target in targets if target is not None), None)


def row_lines(
    jobs: Sequence[JobView],
    search: Search,
    hits: Mapping[int, list[int]],
    notes: Mapping[int, str] = MappingProxyType({}),
) -> list[Line]:
    """The rows that a search has found, with the same rows of the other job.

    Args:
        jobs: the first is the one that was searched.
        hits: from the index of a row to the samples that match.
        notes: from the index of a row to its note.

    Raises:
        StillSearching: the other job has the rows elsewhere, and they take long to find.
    """
    first, *others = jobs
    questions = first.asked
    tables = search.rows(list(hits), [*questions, *_columns(first)])
    samples_of = {row: [first.samples(table)] for row, table in tables.items()}
    for other in others:
        same = _same_rows(other, {row: samples[0][0].row_id for row, samples in samples_of.items()})
        for row, samples in samples_of.items():
            samples.append(same.get(row, []))
    return [
        Line(row, _texts(samples[0][0].row, questions), samples, hits[row], notes.get(row, ""))
        for row, samples in samples_of.items()
    ]


def _same_rows(job: JobView, ids: Mapping[int, str]) -> dict[int, list[RowFacts]]:
    """The samples that a job has of rows with some ids.

    Args:
        ids: by the places of the rows in another job, which are tried first; the result has the
            keys of those rows that the job has.
    """
    search = Search(job.rows, SampleFilter())
    same = {row: job.samples(t) for row, t in search.rows(list(ids), _columns(job)).items()}
    same = {row: located for row, located in same.items() if located[0].row_id == ids[row]}
    elsewhere: dict[int, int] = {}
    for row, row_id in ids.items():
        if row not in same and (index := job.ids.find(row_id)) is not None:
            elsewhere[row] = index
    located = search.rows(sorted(elsewhere.values()), _columns(job))
    return same | {row: job.samples(located[at]) for row, at in elsewhere.items() if at in located}


def _columns(job: JobView) -> list[str]:
    """The columns of a sample that a list shows."""
    schema = job.rows.schema
    names = [] if schema is None else schema.names
    graded = [PREFIX + name for name in _GRADES_SHOWN]
    return [n for n in (*_SHOWN, job.rows.text_column, *graded) if n in names]


def _texts(row: Mapping[str, Any], names: Sequence[str]) -> dict[str, str]:
    return {n: beginning(plain_text(row[n]), _ASKED) for n in names if row[n] is not None}


def list_values(
    jobs: Sequence[JobView], wanted: SampleFilter, first: int, sort: str, show: str
) -> dict[str, Any]:
    """What the template of a list needs.

    Args:
        jobs: the first is the one whose rows are listed.
        first: the index of the row to begin with; with a sort, the place in its order.
        sort: one of ORDERS; empty for the order of the data set.
        show: `votes` in place of texts, or empty.

    Raises:
        ConfigError: the job lacks what the filter or the order needs.
        StillSearching: the other job has the rows elsewhere.
    """
    job, schema = jobs[0], jobs[0].rows.schema
    kept = {**wanted.query, **{k: v for k, v in (("sort", sort), ("show", show)) if v}}
    values = _ranked(jobs, wanted, first, sort) if sort else _in_order(jobs, wanted, first)
    return {
        **values,
        "wanted": wanted,
        "kept": kept,
        "first": first,
        "sort": sort,
        "show": show,
        "orders": orders(schema),
        "num_rows": job.num_rows,
        "columns": [] if schema is None else text_columns(schema),
        "text_column": job.rows.text_column,
        "marks": MARKS if job.rows.grade_names else {},
        "subsets": list(job.subsets) if job.subset_column else [],
        "reasons": REASONS,
        "errors": list(job.metrics.get("errors") or {}),
        "can_vote": "grades/answer_key" in job.rows.grade_names,
    }


def _in_order(jobs: Sequence[JobView], wanted: SampleFilter, first: int) -> dict[str, Any]:
    search = Search(jobs[0].rows, wanted)
    hits = search.forward(first, PER_PAGE)
    return {
        "lines": row_lines(jobs, search, hits.hits),
        "searched": hits.searched,
        "later": hits.next_row,
        "earlier": max(first - PER_PAGE, 0) if first and not wanted else None,
        "ranking": None,
    }


def _ranked(jobs: Sequence[JobView], wanted: SampleFilter, first: int, sort: str) -> dict[str, Any]:
    ranking, later = jobs[0].rankings.of(wanted, sort), first + PER_PAGE
    entries = ranking.entries[first:later]
    hits = {entry.row: entry.samples for entry in entries}
    notes = {entry.row: order_text(sort, entry.value) for entry in entries}
    return {
        "lines": row_lines(jobs, Search(jobs[0].rows, wanted), hits, notes),
        "searched": ranking.searched,
        "later": later if later < len(ranking.entries) else None,
        "earlier": max(first - PER_PAGE, 0) if first else None,
        "ranking": ranking,
        "order": ORDERS[sort],
        "most": MOST,
    }
