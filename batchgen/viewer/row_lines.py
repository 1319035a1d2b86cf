"""The rows of a list, each with its samples in one job or in two."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any

from batchgen.texts.row_json import plain_text
from batchgen.util.shorten import beginning
from batchgen.viewer.job_view import JobView, Sample, same_sample
from batchgen.viewer.rows.filters import Filter
from batchgen.viewer.rows.grade_columns import PREFIX
from batchgen.viewer.rows.search import Search
from batchgen.viewer.votes import Vote, votes

_SHOWN = ("row_id", "finish_reason", "error", "num_generated_tokens")
_GRADES_SHOWN = ("mark", "answer", "answer_key", "graded_against", "grade_error")
_ASKED = 240
"""Characters of a prompt's column."""


@dataclass(frozen=True)
class Line:
    """A row in a list.

    Attributes:
        index: its `row_index`.
        asked: the columns of its prompt, by name, shortened.
        jobs: for each job its samples, whose texts are shortened; empty if it does not have them.
        matching: the numbers of those samples of the first job that the filter lists.
        note: what a sorted list is sorted by; empty in the order of the data set.
    """

    index: int
    asked: dict[str, str]
    jobs: list[list[Sample]]
    matching: list[int]
    note: str = ""

    @property
    def row_id(self) -> str:
        row_id: str = self.jobs[0][0].row["row_id"]
        return row_id

    def shown(self, job: int) -> Sample | None:
        """The sample whose text is shown."""
        return same_sample(self.jobs[job], self.matching[0])

    def votes(self, job: int) -> list[Vote]:
        """The answers of a job to the question."""
        return votes(self.jobs[job])

    @property
    def target(self) -> str | None:
        """What the answers were compared with."""
        grades = (sample.grades for samples in self.jobs for sample in samples)
        found = (g["graded_against"] for g in grades if g and g.get("graded_against") is not None)
        return next(map(str, found), None)


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
        JobError: a shard is damaged.
    """
    first, *others = jobs
    asked = first.inputs()
    tables = search.rows(list(hits), [*asked, *_columns(first)])
    found = {row: [first.samples(table)] for row, table in tables.items()}
    for other in others:
        ids = {row: samples[0][0].row["row_id"] for row, samples in found.items()}
        same = _same_rows(other, ids)
        for row, samples in found.items():
            samples.append(same.get(row, []))
    return [
        Line(row, _texts(samples[0][0].row, asked), samples, hits[row], notes.get(row, ""))
        for row, samples in found.items()
    ]


def _same_rows(job: JobView, ids: Mapping[int, str]) -> dict[int, list[Sample]]:
    """The samples that a job has of the rows with some ids.

    Args:
        ids: from the places of the rows in another job to their ids.

    Returns:
        The samples by those places, as far as the job has them.
    """
    search = Search(job.rows, Filter())
    same = {row: job.samples(t) for row, t in search.rows(list(ids), _columns(job)).items()}
    same = {row: found for row, found in same.items() if found[0].row["row_id"] == ids[row]}
    elsewhere: dict[int, int] = {}
    for row, row_id in ids.items():
        if row not in same and (place := job.ids.find(row_id)) is not None:
            elsewhere[row] = place
    found = search.rows(sorted(elsewhere.values()), _columns(job))
    return same | {row: job.samples(found[at]) for row, at in elsewhere.items() if at in found}


def _columns(job: JobView) -> list[str]:
    """What a list shows of a sample."""
    schema = job.rows.schema
    names = [] if schema is None else schema.names
    graded = [PREFIX + name for name in _GRADES_SHOWN]
    return [n for n in (*_SHOWN, job.rows.text_column, *graded) if n in names]


def _texts(row: Mapping[str, Any], names: Sequence[str]) -> dict[str, str]:
    return {n: beginning(plain_text(row[n]), _ASKED) for n in names if row[n] is not None}
