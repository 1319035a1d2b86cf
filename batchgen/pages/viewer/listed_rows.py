"""Prepares one page of the row list of `batchgen view`: filtered and sorted, for one job or two."""

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
_MOST_SHOWN = 240  # the most that are shown of a prompt column


@dataclass(frozen=True)
class Line:
    """One input row in the list. Its texts are shortened."""

    index: int
    prompt_columns: dict[str, str]  # column → text, the inputs of the prompt
    jobs: list[list[RowFacts]]  # for each job, its samples of the row; empty if it lacks the row
    matching: list[int]  # the numbers of the first job's samples that match the filter
    note: str = ""  # in a sorted list, the value by which the row is sorted

    @property
    def row_id(self) -> str:
        return self.jobs[0][0].row_id

    def shown(self, job: int) -> RowFacts | None:
        """Return the sample of a job whose text is shown: the one with the number of the first
        match."""
        return same_sample(self.jobs[job], self.matching[0])

    def votes(self, job: int) -> list[Vote]:
        """Count the answers of a job's samples."""
        return votes(self.jobs[job])

    @property
    def target(self) -> str | None:
        """The target with which the answers were compared; None if no sample was graded."""
        targets = (s.grade("graded_against") for samples in self.jobs for s in samples)
        return next((str(target) for target in targets if target is not None), None)


def row_lines(
    jobs: Sequence[JobView],
    search: Search,
    hits: Mapping[int, list[int]],
    notes: Mapping[int, str] = MappingProxyType({}),
) -> list[Line]:
    """Read the rows that a search returned, and the same rows of the other job.

    Args:
        jobs: the first is the one that was searched.
        hits: index of a row → the numbers of its matching samples.
        notes: index of a row → its note.

    Raises:
        StillSearching: finding the rows in the other job takes too long for one request.
    """
    first, *others = jobs
    questions = first.prompt_columns
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
    """Read the samples of a job for rows that are given by their ids.

    Args:
        ids: row index in the other job → row_id. That index is tried in this job first.

    Returns:
        The samples, by the same keys as `ids`; rows that this job lacks are left out.
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
    """Return the columns of a sample that the list shows."""
    schema = job.rows.schema
    names = [] if schema is None else schema.names
    graded = [PREFIX + name for name in _GRADES_SHOWN]
    return [n for n in (*_SHOWN, job.rows.text_column, *graded) if n in names]


def _texts(row: Mapping[str, Any], names: Sequence[str]) -> dict[str, str]:
    return {n: beginning(plain_text(row[n]), _MOST_SHOWN) for n in names if row[n] is not None}


def list_values(
    jobs: Sequence[JobView], wanted: SampleFilter, first: int, sort: str, show: str
) -> dict[str, Any]:
    """Return the variables of the list's template.

    Args:
        jobs: the first is the one whose rows are listed.
        first: the index of the first row; in a sorted list, the position in it.
        sort: a key of ORDERS; empty for the order of the data set.
        show: `votes` to show votes instead of texts, or empty.

    Raises:
        ConfigError: the job lacks a column that the filter or the order needs.
        StillSearching: finding the rows in the other job takes too long for one request.
    """
    job, schema = jobs[0], jobs[0].rows.schema
    # What the links to other pages of the list repeat.
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
    """Return the variables of a page in the order of the data set."""
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
    """Return the variables of a page of a sorted list."""
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
