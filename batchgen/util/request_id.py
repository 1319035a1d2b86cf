"""The id of a job's request to the engine, which accepts any hashable value."""

from __future__ import annotations

from typing import NamedTuple


class RequestId(NamedTuple):
    """Identifies the row, the sample and the choice that a request is for.

    Attributes:
        job: the name of the job among those that share an engine; empty for one alone.
        row, sample: the indices of the row and of its sample.
        choice: the index of the choice that is scored beside the row; None for the row itself.
    """

    job: str
    row: int
    sample: int
    choice: int | None = None

    def __str__(self) -> str:
        choice = "" if self.choice is None else f"/{self.choice}"
        return f"{self.row}.{self.sample}{choice}"
