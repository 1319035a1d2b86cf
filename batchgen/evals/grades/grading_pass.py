"""Grades shards: reads the rows of shards without grades, and writes a file of grades, a *part*,
for each shard. `JobGrades.make` runs a pass."""

from __future__ import annotations

import itertools
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq

from batchgen.evals.graders.grade_rows import Grader
from batchgen.evals.graders.step import arrow_schema
from batchgen.evals.grades.changed_marks import ChangedMarks
from batchgen.evals.grades.grade_files import ROW_KEYS, SHARD_KEY, STEPS_KEY, GradePart
from batchgen.storage.shards.checked_file import CheckedFile, read_schema, seal
from batchgen.storage.stores.whole_file import whole_file
from batchgen.util.text.row_json import json_readers

_BATCH = 1024  # rows
_REASON = "finish_reason"
_THREADS = 2
"""The parts that are graded at the same time, if the steps take columns."""


class Stopped(Exception):
    """Raised between two rows or two batches if grading is to stop."""


@dataclass(frozen=True)
class Witness:
    """An observer of rows and grades while they are in memory, so that scores need not read them
    again.

    Attributes:
        columns: the columns that it needs. Shards that lack one are not passed to it.
        see: is called with a written part, its rows and its grades.
    """

    columns: tuple[str, ...]
    see: Callable[[GradePart, pa.Table, pa.Table], None]


@dataclass(frozen=True)
class GradingPass:
    """One pass over the shards that have no grades.

    Attributes:
        grader: runs the steps.
        steps: the steps, for the metadata of the parts.
        text_column: the column of generated text.
        stop: returns whether to stop; called after every row, or after every batch of columns.
        witness: observes the results of steps that take columns; None for none.
        changes: collects the changes of grades that are replaced; None for none.
    """

    grader: Grader
    steps: str
    text_column: str
    stop: Callable[[], bool]
    witness: Witness | None = None
    changes: ChangedMarks | None = None

    def grade(self, parts: Sequence[GradePart]) -> Iterator[tuple[GradePart, int]]:
        """Write the parts one after the other, and yield each part with the number of its rows.

        Raises:
            Stopped: `stop` returned true. Parts that were yielded stay.
        """
        if not self.grader.chain.takes_columns:
            return self._grade_rows(parts)
        return self._grade_in_threads(parts)

    def _grade_in_threads(self, parts: Sequence[GradePart]) -> Iterator[tuple[GradePart, int]]:
        """Write parts whose steps take columns. Most of the time is spent in Arrow and in the
        kernel, so threads can work in parallel."""
        with ThreadPoolExecutor(_THREADS, "grade") as pool:
            try:
                tables = pool.map(self._grade_columns, parts)
                for part, (count, tables_seen) in zip(parts, tables, strict=True):
                    if self.witness is not None and tables_seen is not None:
                        self.witness.see(part, *tables_seen)
                    yield part, count
            finally:
                pool.shutdown(cancel_futures=True)

    def _grade_columns(self, part: GradePart) -> tuple[int, tuple[pa.Table, pa.Table] | None]:
        """Write one part batch by batch. Returns the number of its rows, and the rows and grades
        for the witness."""
        seen: list[tuple[pa.RecordBatch, pa.RecordBatch]] = []
        with CheckedFile(part.shard) as file:
            schema = self._schema(part, file.schema)
            batches = self._graded_batches(file, schema, seen)
            count = self._write(part, schema, batches)
        if self.witness is None or not seen:
            return count, None
        rows, grades = (pa.Table.from_batches(batches) for batches in zip(*seen, strict=True))
        has_columns = set(self.witness.columns) <= set(rows.column_names)
        return count, (rows, grades) if has_columns else None

    def _graded_batches(
        self,
        file: CheckedFile,
        schema: pa.Schema,
        seen: list[tuple[pa.RecordBatch, pa.RecordBatch]],
    ) -> Iterator[pa.RecordBatch]:
        """Yield the grades of the rows of a shard. `seen` receives the rows and grades for the
        witness."""
        more = () if self.witness is None else self.witness.columns
        for batch, readers in self._batches(file, more):
            if self.stop():
                raise Stopped
            fields = {name: batch[name].to_pylist() for name in self._fields(batch.schema)}
            for name in fields.keys() & readers.keys():
                fields[name] = [readers[name](value) for value in fields[name]]
            values = self.grader.chain.all_values(batch[self.text_column], fields)
            columns = [batch[name] for name in ROW_KEYS]
            columns += [pa.array(values[field.name], field.type) for field in self._file_schema]
            grades = pa.RecordBatch.from_arrays(columns, schema=schema)
            if self.witness is not None:
                kept = [name for name in batch.schema.names if name in (*ROW_KEYS, *more)]
                seen.append((batch.select(kept), grades))
            yield grades

    def _grade_rows(self, parts: Sequence[GradePart]) -> Iterator[tuple[GradePart, int]]:
        """Write parts row by row; rows of several parts may be in the workers at the same time."""
        # The keys of the rows that the grader has read and not returned, in order.
        keys: deque[tuple[GradePart, Mapping[str, Any]]] = deque()

        def rows() -> Iterator[tuple[str | None, Mapping[str, Any]]]:
            for part in parts:
                for row in self._rows(part.shard):
                    keys.append((part, {name: row[name] for name in ROW_KEYS}))
                    yield row[self.text_column], row

        def graded() -> Iterator[tuple[GradePart, dict[str, Any]]]:
            for values in self.grader.grade(rows()):
                if self.stop():
                    raise Stopped
                part, key = keys.popleft()
                yield part, {**key, **values}

        for part, pairs in itertools.groupby(graded(), key=lambda pair: pair[0]):
            schema = self._schema(part, read_schema(part.shard))
            values = (row for _, row in pairs)
            yield part, self._write(part, schema, _row_batches(schema, values))

    def _rows(self, shard: Path) -> Iterator[dict[str, Any]]:
        """Yield the rows of a shard, with the columns that the steps read; JSON is parsed."""
        with CheckedFile(shard) as file:
            for batch, readers in self._batches(file):
                for row in batch.to_pylist():
                    for name, read in readers.items():
                        row[name] = read(row[name])
                    yield row

    def _batches(
        self, file: CheckedFile, more: Sequence[str] = ()
    ) -> Iterator[tuple[pa.RecordBatch, Mapping[str, Callable[[Any], Any]]]]:
        """Yield batches of an open shard, with the columns that the steps read and some more, and
        the readers of those columns that are JSON."""
        schema = file.schema
        names = [*ROW_KEYS, *self._fields(schema), self.text_column]
        names += [name for name in more if name in schema.names]
        names = list(dict.fromkeys(names))
        readers = json_readers(pa.schema([schema.field(name) for name in names]))
        read = list(dict.fromkeys([*names, _REASON]))
        for batch in file.batches(_BATCH, read, use_threads=False):
            yield self._answered(batch).select(names), readers

    def _answered(self, batch: pa.RecordBatch) -> pa.RecordBatch:
        """The batch with empty texts instead of null for rows without an error. Such a row ended
        without an answer, which steps mark as wrong; only rows with an error have no text."""
        if not batch[self.text_column].null_count:
            return batch
        is_error = pc.equal(batch[_REASON], "error")
        texts = batch[self.text_column]
        at = batch.schema.get_field_index(self.text_column)
        kept = pc.if_else(is_error, texts, pc.fill_null(texts, ""))
        return batch.set_column(at, batch.schema.field(at), kept)

    def _fields(self, schema: pa.Schema) -> list[str]:
        """The columns that the steps read, without the text and ROW_KEYS. If a step reads all,
        these are the columns before the text, which come from the data set."""
        steps = self.grader.chain.steps
        if all(step.field_names is not None for step in steps):
            wanted = {name for step in steps for name in step.field_names or ()}
            return [name for name in schema.names if name in wanted and name not in ROW_KEYS]
        return list(schema.names[len(ROW_KEYS) : schema.names.index(self.text_column)])

    def _write(self, part: GradePart, schema: pa.Schema, batches: Iterable[pa.RecordBatch]) -> int:
        """Write the grades of one shard; return their number."""
        count = 0
        changes = self.changes
        before = None if changes is None else changes.replaced(part, schema)
        after: list[pa.RecordBatch] = []
        with whole_file(part.path) as temporary:
            # Making dictionaries takes more time than they save after zstd.
            with (
                pa.OSFile(str(temporary), "wb") as sink,
                pq.ParquetWriter(sink, schema, compression="zstd", use_dictionary=False) as writer,
            ):
                for batch in batches:
                    writer.write_batch(batch)
                    count += batch.num_rows
                    if before is not None:
                        after.append(batch.select(before.column_names))
            seal(temporary)
            if changes is not None and before is not None and after:
                changes.add(before, pa.Table.from_batches(after))
        return count

    def _schema(self, part: GradePart, rows: pa.Schema) -> pa.Schema:
        """The columns of a part, from those of its shard."""
        fields = [rows.field(name) for name in ROW_KEYS]
        metadata = {STEPS_KEY: self.steps, SHARD_KEY: part.digest}
        return pa.schema([*fields, *self._file_schema], metadata=metadata)

    @cached_property
    def _file_schema(self) -> pa.Schema:
        return arrow_schema(self.grader.chain.columns)


def _row_batches(schema: pa.Schema, rows: Iterator[dict[str, Any]]) -> Iterator[pa.RecordBatch]:
    while batch := list(itertools.islice(rows, _BATCH)):
        yield pa.RecordBatch.from_pylist(batch, schema=schema)
