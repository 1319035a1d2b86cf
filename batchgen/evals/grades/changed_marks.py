"""Reports which rows get another mark when a job is graded again with other or newer steps, for
`batchgen grade`."""

from __future__ import annotations

import heapq
import json
import threading
from collections import Counter
from collections.abc import Callable
from typing import Any, NamedTuple

import pyarrow as pa
import pyarrow.compute as pc

from batchgen.evals.graders.step import MARK
from batchgen.evals.grades.grade_files import ROW_KEYS, GradePart
from batchgen.storage.shards.checked_file import read_schema
from batchgen.storage.shards.shard_files import read_columns
from batchgen.util.errors import JobError
from batchgen.util.shorten import beginning

_ANSWER = "answer"
_SHOWN = 10  # rows
_LENGTH = 40
"""The most characters of an id or an answer that are shown."""


class ChangedMark(NamedTuple):
    """A row whose mark, or whose marked answer, has changed; None stands for no mark or no
    answer."""

    row_index: int
    sample_index: int
    row_id: str
    mark_before: float | None
    mark: float | None
    answer_before: str | None = None
    answer: str | None = None


class ChangedMarks:
    """Collects the differences between new grades and the grades that they replace. Several threads
    may add to it.

    Grades are compared only if they belong to the same bytes of a shard. So the texts are equal,
    and differences come from the steps.

    Attributes:
        compared: the number of rows that had grades before.
    """

    def __init__(self, write: Callable[[str], None] | None = None) -> None:
        """Collect changes. `write` receives them part by part, as JSON lines of `ChangedMark`,
        before the new grades replace the old ones."""
        self.compared = 0
        self._write = write
        self._lock = threading.Lock()
        self._kinds: Counter[str] = Counter()
        self._first: list[ChangedMark] = []

    @staticmethod
    def replaced(part: GradePart, schema: pa.Schema) -> pa.Table | None:
        """The old grades of a part, with the columns that are compared: ROW_KEYS, marks, and
        answers if there are any. None if there are no old grades, or they cannot be read."""
        if not part.is_of_shard:
            return None
        try:
            file_schema = read_schema(part.path)
            wanted = (*ROW_KEYS, MARK, _ANSWER)
            common = [name for name in wanted if name in file_schema.names and name in schema.names]
            comparable = [
                name for name in common if file_schema.field(name).type == schema.field(name).type
            ]
            if not {*ROW_KEYS, MARK} <= {*comparable}:
                return None
            grades = read_columns(part.path, comparable)
            grades.validate(full=True)
        except (JobError, pa.ArrowInvalid):
            return None
        return grades

    def add(self, before: pa.Table, after: pa.Table) -> None:
        """Compare the grades of one part, both with the columns of `replaced`."""
        if not before.select(ROW_KEYS).equals(after.select(ROW_KEYS)):
            return
        old, new = before[MARK], after[MARK]
        # Two nulls are equal; a null and a mark are not.
        differ = pc.fill_null(pc.not_equal(old, new), pc.xor(old.is_valid(), new.is_valid()))
        indices = pc.indices_nonzero(differ)
        pairs = zip(*(table.take(indices).to_pylist() for table in (before, after)), strict=True)
        rows = [_changed(*pair) for pair in pairs]
        with self._lock:
            if rows and self._write is not None:
                lines = (json.dumps(row._asdict(), ensure_ascii=False) + "\n" for row in rows)
                self._write("".join(lines))
            self.compared += len(before)
            self._kinds.update(map(_kind, rows))
            # The first by `row_index` and `sample_index`.
            self._first = heapq.nsmallest(_SHOWN, [*self._first, *rows])

    def lines(self, more: str = "") -> list[str]:
        """Lines about the changes: the number of marks, and the first rows. `more` says where to
        find the others."""
        if not self.compared:
            return []
        count = self._kinds.total()
        if not count:
            return [f"None of the {self.compared:,} marks has changed."]
        kinds = ", ".join(f"{self._kinds[kind]:,} {kind}" for kind in _KINDS if self._kinds[kind])
        lines = [f"{count:,} of {self.compared:,} marks have changed: {kinds}"]
        lines += map(_line, self._first)
        if count > _SHOWN:
            lines.append(f"  … {count - _SHOWN:,} more{more}")
        return lines


_WORSE, _BETTER, _OTHERWISE = "from right to wrong", "from wrong to right", "in another way"
_KINDS = (_WORSE, _BETTER, _OTHERWISE)


def _kind(row: ChangedMark) -> str:
    """The kind of a change. A mark of 1 is right, and any other is wrong."""
    before, after = row.mark_before, row.mark
    if before is None or after is None or (before == 1) == (after == 1):
        return _OTHERWISE
    return _WORSE if before == 1 else _BETTER


def _changed(before: dict[str, Any], after: dict[str, Any]) -> ChangedMark:
    """The change of a row, from its old and its new grades."""
    return ChangedMark(
        after["row_index"],
        after["sample_index"],
        after["row_id"],
        before[MARK],
        after[MARK],
        before.get(_ANSWER),
        after.get(_ANSWER),
    )


def _line(row: ChangedMark) -> str:
    """A change as a line: `  q7 sample 2: wrong → right, answer "17" → "18"`."""
    name = beginning(row.row_id, _LENGTH) + f" sample {row.sample_index}" * (row.sample_index > 0)
    line = f"  {name}: {_word(row.mark_before)} → {_word(row.mark)}"
    answers = [_shown(answer) for answer in (row.answer_before, row.answer)]
    if row.answer_before == row.answer:
        return line if row.answer is None else f"{line}, answer {answers[0]}"
    return f"{line}, answer {answers[0]} → {answers[1]}"


def _word(mark: float | None) -> str:
    if mark is None:
        return "no mark"
    return {0.0: "wrong", 1.0: "right"}.get(mark, f"{mark:.3g}")


def _shown(answer: str | None) -> str:
    return "none" if answer is None else f'"{beginning(answer, _LENGTH)}"'
