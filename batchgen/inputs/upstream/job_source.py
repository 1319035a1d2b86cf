"""A `Source` whose rows are answers of other jobs (`dataset=job`). `open_source` makes it.

For example, a job that judges answers reads them with `dataset.path=OUT`: from answer 3 of the row
q17 it makes a row with the id `q17#3`, the columns that the other job copied from its data set, its
generated text, and `source: {row_id: q17, sample_index: 3, digest: …}`.
"""

from __future__ import annotations

import itertools
import operator
import time
from bisect import bisect_right
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import numpy as np
import pyarrow as pa

from batchgen.config.groups.dataset_config import DatasetConfig
from batchgen.engine.interface.outputs import RequestError
from batchgen.evals.grades.visible_columns import GRADES
from batchgen.inputs.dataset.source import Left, ReadJob, Row, Source
from batchgen.inputs.tables.json_values import json_encoder
from batchgen.inputs.upstream.chosen_answers import AnswerSelector, Chosen, Ints, ReadPosition
from batchgen.inputs.upstream.followed_job import ReadableJob
from batchgen.inputs.upstream.job_columns import (
    SAMPLE_INDEX,
    SOURCE,
    job_columns,
    with_grades,
)
from batchgen.inputs.upstream.row_columns import ROW_ID, AnswerColumns
from batchgen.util.errors import ConfigError
from batchgen.util.fingerprint import fingerprint_text
from batchgen.util.text.row_json import json_readers

_AT_ONCE = 64
"""The rows that `rows_at` reads together if they are not in order. Each may be in a different row
group."""
_LOOK_SECONDS = 0.05
"""The minimum time between two looks for new shards."""
_TEXT = " text"
"""The text of an answer in tables of this module. The space avoids a clash with any column of a
data set, as in ROW_ID."""


@dataclass(frozen=True, slots=True)
class UpstreamRow(Row):
    """A row that is made of answers of another job.

    Attributes:
        source: the value of its column `source`, which names the answers.
    """

    source: dict[str, Any] = field(kw_only=True)


class JobSource(Source):
    """The answers of other jobs as rows, with random access.

    A job that still runs is followed: its rows are those of the shards that are ready. What is
    chosen of a shard depends on that shard alone, so in the end the rows are those of the complete
    job.

    The columns that the other jobs copied from their data sets are copied again, and the column
    `source` is added. `Row.fields` has only the columns that are read: those that are copied or
    named. Memory holds 16 bytes per row, and one row group of a shard with the columns that are
    read.
    """

    def __init__(
        self, jobs: Sequence[ReadableJob], config: DatasetConfig, named: frozenset[str] | None
    ) -> None:
        """Take the jobs. Their answers are first read by `learn`.

        Args:
            named: the columns that the job uses besides those that it copies; None for all.

        Raises:
            ConfigError: a column is unknown or has two meanings.
        """
        self._jobs, self._config = jobs, config
        self._columns = known = job_columns(jobs, config)
        self._lists = config.rows == "rows"  # whether a row has the lists of all its samples
        of_rows = self._of_rows = AnswerColumns(known, config)
        self.schema = of_rows.copied()
        used = None if named is None else named | set(self.schema.names)
        self._read, self._grades = known.read(used)  # columns of the rows and of the grades
        self._choice = AnswerSelector(config, known)
        self._uses_grades = self._choice.reads_grades or bool(self._grades)
        for job in jobs:
            job.needs_grades = self._uses_grades
        self._read_positions = [ReadPosition() for _ in jobs]
        # The chosen answers in parts (shards, or whole jobs), each with the index of its job; and
        # the number of rows up to the end of each part.
        self._chosen: list[tuple[int, Chosen]] = []
        self._ends: list[int] = []
        self._next_look = 0.0
        self.features = of_rows.features()
        self.columns = tuple(self.features)
        # The names in `Row.fields`; GRADES is the struct of all grades.
        whole = [GRADES] if used is None or GRADES in used else []
        self._names = [*self._read, *(name for name in whole if self._grades)]
        self._names += [n for n in self._grades if used is None or (n in used and n in known.flat)]
        # Parse columns that hold JSON as text, and write the copied ones as such text again.
        self._readers = {
            name: partial(_each, read) if self._lists and name not in known.passthrough else read
            for name, read in json_readers(
                known.fields[name].with_name(name) for name in self._read
            ).items()
        }
        self._encoders = {
            field.name: encode
            for field in self.schema
            if field.name != SOURCE
            and (encode := json_encoder(self.features[field.name], field.type)) is not None
        }

    def learn(self, may_write: Callable[[], bool] = lambda: False) -> bool:
        """Choose among the answers of new shards, which reads what the expressions need; see
        `Source`. Calls in quick succession do nothing."""
        if self._is_complete or time.monotonic() < self._next_look:
            return False
        has_more = False
        for number, (job, position) in enumerate(
            zip(self._jobs, self._read_positions, strict=True)
        ):
            while job.learn():
                chosen = self._choice.of(job, number, position)
                self._chosen.append((number, chosen))
                self._ends.append((self._ends or [0])[-1] + len(chosen.ends))
                has_more = True
        self._next_look = time.monotonic() + _LOOK_SECONDS
        if self._is_complete and not self.num_ready:
            raise ConfigError(_nothing_left(self._jobs, self._choice))
        return has_more or self._is_complete

    @property
    def _is_complete(self) -> bool:
        return all(job.is_complete for job in self._jobs)

    @property
    def follows(self) -> bool:
        """See `Source`."""
        return any(job.follows for job in self._jobs)

    @property
    def num_rows(self) -> int | None:
        """See `Source`."""
        return self.num_ready if self._is_complete else None

    @property
    def num_ready(self) -> int:
        """See `Source`."""
        number = (self._ends or [0])[-1]
        return min(number, self._config.limit or number)

    @property
    def ends(self) -> list[int]:
        """See `Source`."""
        return [min(end, self.num_ready) for end in self._ends]

    @property
    def funnel(self) -> tuple[Left, ...]:
        """See `Source`."""
        return self._choice.funnel

    @property
    def jobs(self) -> tuple[ReadJob, ...]:
        """See `Source`."""
        return tuple(job.read for job in self._jobs)

    @property
    def num_errors(self) -> int:
        """The number of answers that are errors."""
        return self._choice.num_errors

    @property
    def fingerprint(self) -> str:
        """See `Source`."""
        facts = [self._prefix(job) + job.read.digest + job.fingerprint for job in self._jobs]
        grade_digests = [job.grades_digest if self._uses_grades else "" for job in self._jobs]
        return fingerprint_text("jobs", *facts, *grade_digests)

    def rows(self, start: int = 0) -> Iterator[Row]:
        """See `Source`."""
        return self._as_rows(self._tables(range(start, self.num_ready)))

    def rows_at(self, indices: Sequence[int]) -> Iterator[Row]:
        """See `Source`."""
        if all(map(operator.lt, indices, itertools.islice(indices, 1, None))):
            yield from self._as_rows(self._tables(indices))
            return
        for start in range(0, len(indices), _AT_ONCE):
            some = indices[start : start + _AT_ONCE]
            rows = {row.index: row for row in self._as_rows(self._tables(sorted(set(some))))}
            yield from (rows[index] for index in some)

    def passthrough(self, row: Row) -> dict[str, Any]:
        """See `Source`."""
        assert isinstance(row, UpstreamRow)
        values = {name: row.fields[name] for name in self.schema.names if name != SOURCE}
        values |= {name: encode(values[name]) for name, encode in self._encoders.items()}
        return {**values, SOURCE: row.source}

    def tables(self, stop: int, size: int) -> Iterator[pa.Table]:
        """Yield the columns that are read of the rows before `stop`; see `Source`."""
        pending: list[pa.Table] = []
        for _, table in self._tables(range(stop)):
            pending.append(table)
            if sum(map(len, pending)) >= size:
                joined = pa.concat_tables(pending)
                whole = len(joined) // size * size
                for first in range(0, whole, size):
                    yield joined.slice(first, size).combine_chunks()
                pending = [joined.slice(whole)]
        joined = pa.concat_tables(pending) if pending else pa.table({})
        if len(joined):
            yield joined.combine_chunks()

    def _prefix(self, job: ReadableJob) -> str:
        """Return the prefix of the ids of a job's rows, which distinguishes them from those of
        other jobs."""
        return f"{job.read.name}/" if len(self._jobs) > 1 else ""

    def _as_rows(self, tables: Iterator[tuple[Sequence[int], pa.Table]]) -> Iterator[Row]:
        """Yield rows from tables with their numbers."""
        for indices, table in tables:
            for index, values in zip(indices, table.to_pylist(), strict=True):
                fields = {name: values[name] for name in self._names}
                fields |= {name: read(fields[name]) for name, read in self._readers.items()}
                source = self._source(values["row_id"], values[SAMPLE_INDEX], values[_TEXT])
                failure = self._failure(index)
                yield UpstreamRow(index, values[ROW_ID], fields, failure, source=source)

    def _source(self, row_id: str, sample: Any, text: Any) -> dict[str, Any]:
        """Return the value of the column `source`. With `dataset.rows=rows`, `text` is the list of
        all samples' texts."""
        texts = text if self._lists else [text]
        digest = None if texts == [None] else fingerprint_text(*(one or "" for one in texts))
        sample = None if self._lists else sample
        return {"row_id": row_id, "sample_index": sample, "digest": digest}

    def _failure(self, index: int) -> RequestError | None:
        """Return the error of row `index`; None if it has none."""
        part = bisect_right(self._ends, index)
        first = self._ends[part - 1] if part else 0
        why = self._chosen[part][1].failures.get(index - first)
        return None if why is None else RequestError("bad_row", why)

    def _tables(self, indices: Sequence[int]) -> Iterator[tuple[Sequence[int], pa.Table]]:
        """Yield the columns that are read of the rows with these ascending indices, in tables of
        several rows, each with the indices of its rows."""
        wanted, at = np.asarray(indices, np.int64), 0
        while at < len(wanted):
            part = bisect_right(self._ends, int(wanted[at]))
            first = self._ends[part - 1] if part else 0
            stop = int(np.searchsorted(wanted, self._ends[part]))
            yield from self._of_part(part, wanted[at:stop] - first, first)
            at = stop

    def _of_part(
        self, part: int, rows: Ints, first: int
    ) -> Iterator[tuple[Sequence[int], pa.Table]]:
        """Yield tables of rows of one part, as `_tables` does.

        Args:
            part: the index of the part in `_chosen`.
            rows: [R] the numbers of the rows within the part, ascending.
            first: the number of the part's first row.
        """
        number, chosen = self._chosen[part]
        # [R], the answers of each row are chosen.answers[starts:ends].
        ends = chosen.ends[rows]
        starts = np.where(rows > 0, chosen.ends[rows - 1], 0)
        sizes = ends - starts
        offsets = np.cumsum(sizes)  # [R], where each row ends among the answers that are read
        # The indices starts[0] … ends[0] - 1, starts[1] … ends[1] - 1, … in one array.
        indices = np.repeat(starts - (offsets - sizes), sizes) + np.arange(int(offsets[-1]))
        rows_done, pending, answers_read = 0, list[pa.Table](), 0
        for table in self._answers(number, chosen.answers[indices]):
            pending.append(table)
            answers_read += len(table)
            # How many rows have all their answers in the tables so far.
            whole = int(np.searchsorted(offsets, answers_read, side="right"))
            if whole > rows_done:
                begin = int(offsets[rows_done - 1]) if rows_done else 0
                cut = int(offsets[whole - 1]) - begin
                joined = pa.concat_tables(pending).combine_chunks()
                part_rows = joined.slice(0, cut)
                if self._lists:
                    part_rows = self._of_rows.in_lists(
                        part_rows, np.diff(offsets[rows_done:whole], prepend=begin)
                    )
                yield (first + rows[rows_done:whole]).tolist(), part_rows
                pending, rows_done = [joined.slice(cut)], whole

    def _answers(self, number: int, answers: Ints) -> Iterator[pa.Table]:
        """Yield the columns that are read of some answers of a job, under their names in this
        job."""
        job, known = self._jobs[number], self._columns
        column_of = {name: known.source_names[name][number] for name in self._read}
        columns = list(dict.fromkeys([*job.id_columns, job.text_column, *column_of.values()]))
        prefix = self._prefix(job)
        for table, grades in job.answers(answers, columns, self._grades):
            ids, samples = job.ids(table).to_pylist(), table[SAMPLE_INDEX].to_pylist()
            ids = [prefix + row_id for row_id in ids]
            paths = ids
            if self._config.rows == "samples":
                paths = [f"{a}#{s}" for a, s in zip(ids, samples, strict=True)]
            values = {ROW_ID: pa.array(paths), "row_id": pa.array(ids)}
            values |= {SAMPLE_INDEX: table[SAMPLE_INDEX], _TEXT: table[job.text_column]}
            values |= {name: table[column] for name, column in column_of.items()}
            yield with_grades(pa.table(values), grades)


def _nothing_left(jobs: Sequence[ReadableJob], choice: AnswerSelector) -> str:
    """Return the message that no rows are left, with the counts of the choices and examples."""
    names = ", ".join(job.user_path for job in jobs)
    steps = "; ".join(f"{left.choice}: {left.rows:,}" for left in choice.funnel)
    examples = "".join(f"\n  {example}" for example in choice.examples)
    example_text = f"; dataset.where dropped, for example:{examples}" if examples else ""
    return f"dataset.path: no row of {names} is left ({steps}){example_text}"


def _each(read: Callable[[Any], Any], values: list[Any]) -> list[Any]:
    """Apply a function to each value of a list."""
    return list(map(read, values))
