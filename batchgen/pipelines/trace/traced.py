"""The result of a trace: what was found on the way from a row back to its sources."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any


@dataclass(frozen=True)
class TracedLine:
    """A line of an exported file, counted from 1."""

    file: str
    line: int
    content: Mapping[str, Any]


@dataclass(frozen=True)
class TracedAnswers:
    """Samples of a row in a job's folder, each with its grades.

    Attributes:
        job: the folder.
        rows: all columns of each sample.
        grades: of each sample; empty where there are none.
        steps: the steps of `rows` that the row has passed.
        text_column: the column of generated text.
    """

    job: str
    rows: Sequence[Mapping[str, Any]]
    grades: Sequence[Mapping[str, Any]]
    steps: Sequence[str]
    text_column: str


@dataclass(frozen=True)
class TracedInSet:
    """A row of a set that `select` has written."""

    set: str
    row: Mapping[str, Any]


@dataclass(frozen=True)
class TracedSource:
    """The row of the data set at the beginning of the chain; numbers are counted from 0.

    Attributes:
        data_set: its path or its name.
        row_index: the number of the row there.
        file: the file that has it, if that is known, and `row_in_file` its number in it.
    """

    data_set: str
    row_index: int
    file: str | None = None
    row_in_file: int | None = None


@dataclass(frozen=True)
class DropReason:
    """The reason why a row is missing: what has left it out, and why, in words."""

    where: str
    row_id: str
    by: str
    reason: str


Found = TracedLine | TracedAnswers | TracedInSet | TracedSource | DropReason


@dataclass
class Trace:
    """A trace: from the requested row back to the data set, or to what has dropped it."""

    origins: list[Found] = field(default_factory=list)

    @property
    def is_there(self) -> bool:
        """Whether the row is in the data, and was not dropped on the way."""
        return bool(self.origins) and not isinstance(self.origins[0], DropReason)
