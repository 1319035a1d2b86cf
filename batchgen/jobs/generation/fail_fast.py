"""Stops a job early if its first rows all fail in the same way, which means that the job is wrong
and not the rows. `Generation` passes finished rows through `FailFast`."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from batchgen.storage.shards.output_schema import FinishedRow
from batchgen.util.errors import JobError

FIRST_ROWS = 50
"""Rows that must all fail in the same way before a job stops."""


class AllRowsFailed(JobError):
    """The first rows of a job, or all its rows, failed in the same way; none of them was
    written."""


class FailFast:
    """Holds back the first rows of a job while all of them fail with the same type of error.

    As soon as a row has an answer, or fails in another way, all rows that were held back may be
    written, and this object has nothing more to do. Rows that are held back are lost with the
    process; the next attempt computes them again, so that a mistake which was mended in between
    leaves no trace.
    """

    def __init__(self, enabled: bool, others_have_rows: Callable[[], bool] = lambda: False) -> None:
        """Hold back rows if `enabled`. `others_have_rows` says whether another worker of the job
        has written rows: then rows are not all failing, and those of this worker are let
        through."""
        self._undecided = enabled
        self._others_have_rows = others_have_rows
        self._held: list[FinishedRow] = []
        self._indices: set[int] = set()

    @property
    def wait(self) -> bool:
        """Whether FIRST_ROWS rows have failed, so that no row should begin until those in flight
        have ended."""
        return self._undecided and len(self._indices) >= FIRST_ROWS

    @property
    def holds_rows(self) -> bool:
        """Whether rows are held back."""
        return bool(self._held)

    def passed(self, finished: Sequence[FinishedRow], in_flight: int) -> list[FinishedRow]:
        """Take rows that have finished, and return those that may be written now.

        `in_flight` is the number of rows that still run.

        Raises:
            AllRowsFailed: the first rows have all failed in the same way, and no other row runs.
        """
        if not self._undecided:
            return list(finished)
        self._held += finished
        self._indices.update(row.row_index for row in finished)
        if len({row.failure and row.failure.type for row in self._held}) > 1 or any(
            row.failure is None for row in finished
        ):
            return self.rest()
        if self.wait and not in_flight:
            if self._others_have_rows():
                return self.rest()
            raise self._stop(f"the first {len(self._indices):,} rows have all")
        return []

    def ended(self, num_rows: int | None) -> list[FinishedRow]:
        """Return the rows that may be written when no further row can begin.

        Raises:
            AllRowsFailed: each of the job's `num_rows` input rows has failed in the same way.
        """
        if self._held and len(self._indices) == num_rows and not self._others_have_rows():
            rows = len(self._indices)
            who = (
                f"all {rows:,} rows of the job have" if rows > 1 else "the only row of the job has"
            )
            raise self._stop(who)
        return self.rest()

    def rest(self) -> list[FinishedRow]:
        """Return all rows that were held back, for writing, and hold back no rows from now on."""
        self._undecided = False
        held, self._held = self._held, []
        return held

    def _stop(self, who: str) -> AllRowsFailed:
        first = min(self._held, key=lambda row: (row.row_index, row.sample_index))
        assert first.failure is not None
        return AllRowsFailed(
            f"{who} failed in the same way: {first.failure.type}: {first.failure} (row "
            f"{first.row_id}). The job has stopped, and none of these rows was written: correct "
            "what is wrong and run the command again, with the same output.dir; "
            "output.on_all_errors=continue writes such rows and continues"
        )
