"""The id of a job's request to the engine, which accepts any hashable value."""

from __future__ import annotations

from typing import NamedTuple


class RequestId(NamedTuple):
    """Identifies the row, the sample and the choice that a request belongs to.

    Attributes:
        job: the name of the job among those that share an engine; empty for a single job.
        row: the index of the input row.
        sample: the index of the sample of the row.
        choice: the index of an answer choice that is scored in addition to the row; None for the
            row itself.
    """

    job: str
    row: int
    sample: int
    choice: int | None = None

    def __str__(self) -> str:
        choice = "" if self.choice is None else f"/{self.choice}"
        return f"{self.row}.{self.sample}{choice}"
