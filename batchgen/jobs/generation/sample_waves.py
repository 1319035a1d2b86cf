"""Decides which samples of a row begin when.

Where a job samples until enough answers are valid (`storage/shards/enough.py`), the samples of a
row begin in waves (`SampleWaves`): further samples begin only if too few of the earlier ones are
valid. In all other jobs every sample begins at once (`EverySample`). `Generation` uses either
through the same methods.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from batchgen.jobs.generation.valid_samples import Judge
from batchgen.storage.shards.output_schema import FinishedRow

if TYPE_CHECKING:
    from batchgen.inputs.dataset.source import Row
    from batchgen.storage.shards.output_writer import OutputWriter


class EverySample:
    """Begins all samples of a row at once; a sample may be written as soon as the engine has
    finished it."""

    pending = 0
    """The number of samples that the engine has finished and `finished` has not returned yet."""

    def tasks(
        self, todo: Iterator[tuple[Row, list[int]] | None], has_room: Callable[[], bool]
    ) -> Iterator[tuple[Row, list[int]] | None]:
        """The rows of the queue `todo`, each with the numbers of the samples to begin. None stands
        for a time at which no row can begin. `has_room` says whether the engine could run more
        requests."""
        return todo

    def finished(self, rows: list[FinishedRow]) -> list[FinishedRow]:
        """Take rows that the engine has finished; return those that can be written."""
        return rows

    def rest(self) -> list[FinishedRow]:
        """Wait for all rows that were taken; return those that can be written."""
        return []

    def written(self, rows: Sequence[FinishedRow]) -> None:
        """Note rows that were written, or that are no longer needed."""

    def close(self) -> None:
        """Stop background work."""


@dataclass
class _BegunRow:
    """A row of an open shard."""

    row: Row
    begun: set[int] = field(default_factory=set)  # samples that are not written yet


class SampleWaves(EverySample):
    """Begins the samples of rows in waves, each as large as it must be.

    While there are other rows to begin, a wave has only samples that the row keeps in any case, so
    nothing is computed in vain. When there are no other rows and the engine has room, more samples
    begin ahead: as many as the row likely needs, by its own rate of valid answers. Which samples a
    row keeps does not depend on any of this (`shards/enough.py`).
    """

    def __init__(self, judge: Judge, writer: OutputWriter) -> None:
        self._judge, self._writer = judge, writer
        self._rows: dict[int, _BegunRow] = {}  # row index → row
        # Ordered sets of row indices. In `_news`: rows that are new or of which a sample was
        # written, so that they may need more samples. In `_ahead`: the same rows, until their
        # samples were begun ahead.
        self._news: dict[int, None] = {}
        self._ahead: dict[int, None] = {}

    @property
    def pending(self) -> int:  # type: ignore[override]
        return self._judge.pending

    def tasks(
        self, todo: Iterator[tuple[Row, list[int]] | None], has_room: Callable[[], bool]
    ) -> Iterator[tuple[Row, list[int]] | None]:
        shard = -1
        while True:
            while self._news:
                if (task := self._more(self._pop(self._news))) is not None:
                    yield task
            try:
                next_task = next(todo)
            except StopIteration:
                return
            if next_task is None:
                yield self._begin_ahead() if has_room() else None
                continue
            row, _ = next_task  # `_more` decides which samples begin
            if (number := self._writer.shard_of(row.index)) != shard:
                shard = number
                self._forget_closed()
            self._rows.setdefault(row.index, _BegunRow(row))
            self._news[row.index] = None

    def finished(self, rows: list[FinishedRow]) -> list[FinishedRow]:
        return self._judge.judged(rows)

    def rest(self) -> list[FinishedRow]:
        return self._judge.rest()

    def written(self, rows: Sequence[FinishedRow]) -> None:
        for row in rows:
            if (known := self._rows.get(row.row_index)) is not None:
                known.begun.discard(row.sample_index)
                self._news[row.row_index] = self._ahead[row.row_index] = None

    def close(self) -> None:
        self._judge.close()

    def _more(self, index: int, *, ahead: bool = False) -> tuple[Row, list[int]] | None:
        """Begin samples that a row needs, and return them; None if it needs none."""
        if (known := self._rows.get(index)) is None:
            return None
        samples = self._writer.wanted(index, known.begun, ahead=ahead)
        known.begun.update(samples)
        return (known.row, samples) if samples else None

    def _begin_ahead(self) -> tuple[Row, list[int]] | None:
        """Begin samples that are likely needed; None if there are none."""
        while self._ahead:
            if (task := self._more(self._pop(self._ahead), ahead=True)) is not None:
                return task
        if not any(known.begun for known in self._rows.values()):
            # Another worker may have written different samples, so that a row needs
            # more again.
            for index in self._rows:
                if (task := self._more(index)) is not None:
                    return task
        return None

    @staticmethod
    def _pop(indices: dict[int, None]) -> int:
        index = next(iter(indices))
        del indices[index]
        return index

    def _forget_closed(self) -> None:
        """Forget the rows of shards that are published."""
        for index, known in list(self._rows.items()):
            if not known.begun and not self._writer.is_open(self._writer.shard_of(index)):
                del self._rows[index]
        for indices in (self._news, self._ahead):
            for index in indices.keys() - self._rows.keys():
                del indices[index]
