"""The result of a trace: the items on the way from a row back to its sources. `trace_row` returns a
`Trace`."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any


@dataclass(frozen=True)
class TracedLine:
    """A line of an exported file; lines are counted from 1."""

    file: str
    line: int
    content: Mapping[str, Any]


@dataclass(frozen=True)
class TracedAnswers:
    """Samples of a row in a job, with their grades.

    Attributes:
        job: the folder.
        rows: for each sample, all its columns.
        grades: for each sample, its grades; empty if it has none.
        steps: the steps of `rows` that the row has passed.
        text_column: the column of the generated text.
    """

    job: str
    rows: Sequence[Mapping[str, Any]]
    grades: Sequence[Mapping[str, Any]]
    steps: Sequence[str]
    text_column: str


@dataclass(frozen=True)
class TracedInSet:
    """A row of a set that `select` wrote."""

    set: str
    row: Mapping[str, Any]


@dataclass(frozen=True)
class TracedSource:
    """A row of a data set, where a chain begins. Rows are counted from 0.

    Attributes:
        data_set: the path or the name of the data set.
        row_index: the index of the row in the data set.
        file: the file with the row; None if unknown.
        row_in_file: the index of the row in the file; None if unknown.
    """

    data_set: str
    row_index: int
    file: str | None = None
    row_in_file: int | None = None


@dataclass(frozen=True)
class DropReason:
    """Why a row is missing.

    Attributes:
        where: the folder in which the row is missing.
        by: the step or option that dropped the row.
        reason: why, in words.
    """

    where: str
    row_id: str
    by: str
    reason: str


TraceItem = TracedLine | TracedAnswers | TracedInSet | TracedSource | DropReason


@dataclass
class Trace:
    """A trace: the items from the requested row back to the data set, or to the reason why the row
    is missing."""

    origins: list[TraceItem] = field(default_factory=list)

    @property
    def is_there(self) -> bool:
        """Whether the requested row exists, and was not dropped."""
        return bool(self.origins) and not isinstance(self.origins[0], DropReason)
