"""Decides which finished samples fulfil `sampling.until.where`, by grading them while the job runs.

`ValidWhere` is the expression, and `Judge` evaluates it for samples. `SampleWaves` asks the judge.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any

from batchgen.config.groups.job_config import JobConfig
from batchgen.config.groups.output_config import ScoreConfig
from batchgen.engine.device.host_limits import usable_cores
from batchgen.evals.graders.build_steps import post_steps, step_descriptions
from batchgen.evals.graders.grade_rows import Grader, StepChain
from batchgen.evals.graders.step import GRADE_ERROR, PostStep
from batchgen.evals.grades.grade_files import ROW_KEYS
from batchgen.evals.grades.visible_columns import VisibleColumns
from batchgen.storage.shards.enough import ENOUGH_COLUMNS
from batchgen.storage.shards.output_schema import FinishedRow, OutputSchema
from batchgen.storage.shards.row_order import KEYS, SAMPLE_COLUMN
from batchgen.util.templates.row_expression import ExpressionFailed, RowExpression
from batchgen.util.text.row_json import json_readers

KEY = "sampling.until.where"


@dataclass(frozen=True)
class ValidWhere:
    """The expression `sampling.until.where` with the `post` steps whose columns it reads.

    Attributes:
        expression: the expression.
        seen: the columns that it may read.
        steps: the job's steps up to the last one whose columns it reads.
        described: these steps with their versions, as plain values for the manifest, because the
            samples depend on them.
        schema: the columns of the job's shards.
    """

    expression: RowExpression
    seen: VisibleColumns
    steps: tuple[PostStep, ...]
    described: Sequence[Mapping[str, Any]]
    schema: OutputSchema

    @staticmethod
    def build(config: JobConfig, schema: OutputSchema) -> ValidWhere | None:
        """Read the expression of a job; None if the job has none.

        Raises:
            ConfigError: the expression is wrong, or reads columns that do not exist.
        """
        until = config.sampling.until
        if until is None:
            return None
        post = post_steps(config.post)
        names = {"row_id", *KEYS, *(name for name, *_ in ENOUGH_COLUMNS)}
        data = [name for name in schema.arrow.names if name not in names]
        grades = [column.name for column in StepChain(post).columns] if post else []
        visible = VisibleColumns(data, grades, (SAMPLE_COLUMN,))
        expression = visible.expression(KEY, until.where)
        count = _num_read(post, visible.read_by(expression).grades)
        descriptions = step_descriptions(config.post[:count], post[:count])
        return ValidWhere(expression, visible, post[:count], descriptions, schema)

    @property
    def is_isolated(self) -> bool:
        """Whether a step needs a process of its own, and may take long."""
        return any(step.isolated for step in self.steps)

    def rows(self, finished: Sequence[FinishedRow]) -> list[dict[str, Any]]:
        """Finished samples as rows of a shard, with only the columns that the steps and the
        expression read."""
        names = [*ROW_KEYS, self.schema.text_column, *self._fields(), *self.seen.data]
        read = self.seen.read_by(self.expression).data
        kept = {*ROW_KEYS, self.schema.text_column, *self._fields(), *read}
        names = [name for name in dict.fromkeys(names) if name in kept]
        batch = self.schema.encode(finished).select(names)
        rows: list[dict[str, Any]] = batch.to_pylist()
        readers = json_readers(batch.schema)
        for row in rows if readers else ():
            row |= {name: read(row[name]) for name, read in readers.items()}
        return rows

    def is_valid(self, row: Mapping[str, Any], grades: Mapping[str, Any]) -> bool:
        """Whether a sample with these columns and grades fulfils the expression.

        Raises:
            ExpressionFailed: the expression has no value for this sample.
        """
        values = self.seen.variables(row, grades)
        return self.expression.is_true(values, row["row_id"], row["row_index"])

    def _fields(self) -> list[str]:
        """The names of the columns of the data set that the steps read."""
        if not self.steps:
            return []
        if all(step.field_names is not None for step in self.steps):
            return [name for step in self.steps for name in step.field_names or ()]
        names: list[str] = self.schema.arrow.names
        return names[len(ROW_KEYS) : names.index(self.schema.text_column)]


def _num_read(post: Sequence[PostStep], grades: frozenset[str]) -> int:
    """How many of the steps are needed to compute the columns `grades`: a step may need all steps
    before it."""
    if GRADE_ERROR.name in grades:
        return len(post)
    writers = (
        number
        for number, step in enumerate(post, start=1)
        if any(column.name in grades for column in step.columns)
    )
    return max(writers, default=0)


class Judge:
    """Judges which samples are valid, in a thread if a step may take long."""

    def __init__(self, where: ValidWhere, config: ScoreConfig) -> None:
        self._where = where
        workers = config.workers or usable_cores()
        self._grader = Grader(where.steps, workers=workers, seconds=config.seconds)
        self._thread = ThreadPoolExecutor(1, "judge") if where.is_isolated else None
        self._futures: list[Future[list[FinishedRow]]] = []
        self._judged: list[FinishedRow] = []
        self._waiting: list[FinishedRow] = []
        self._num_waiting = 0  # together with the samples that the thread judges
        self._closed = self._has_warned = False

    @property
    def pending(self) -> int:
        """The number of samples that were taken and not returned yet."""
        return self._num_waiting + len(self._judged)

    def judged(self, finished: Sequence[FinishedRow]) -> list[FinishedRow]:
        """Take finished samples. Return those that are judged by now, with `valid` set."""
        if self._thread is None:
            return self._judge(finished)
        self._waiting += finished
        self._num_waiting += len(finished)
        while self._futures and self._futures[0].done():
            self._take(self._futures.pop(0))
        if self._waiting and not self._futures:  # all that wait are judged together
            self._futures.append(self._thread.submit(self._judge, self._waiting))
            self._waiting = []
        judged, self._judged = self._judged, []
        return judged

    def rest(self) -> list[FinishedRow]:
        """Wait for all samples that were not returned yet, and return them."""
        judged = self.judged(())
        while self._num_waiting:
            self._futures[0].exception()  # waits; `judged` raises the error
            judged += self.judged(())
        return judged

    def close(self) -> None:
        """End the processes of the steps."""
        self._closed = True
        if self._thread is None:
            self._grader.close()
        else:  # by the thread that uses them
            self._thread.submit(self._grader.close)
            self._thread.shutdown()

    def _take(self, future: Future[list[FinishedRow]]) -> None:
        rows = future.result()
        self._num_waiting -= len(rows)
        self._judged += rows

    def _judge(self, finished: Sequence[FinishedRow]) -> list[FinishedRow]:
        """Set `valid` of finished samples: None for a sample without an answer, or that the
        expression fails for."""
        answered = [row for row in finished if row.failure is None]
        if not answered:
            return list(finished)
        rows = self._where.rows(answered)
        text = self._where.schema.text_column

        def texts() -> Iterator[tuple[str | None, Mapping[str, Any]]]:
            for row in rows:
                if self._closed:  # the marks are no longer needed
                    return
                yield row[text] or "", row  # null where the model gave no answer

        graded = self._grader.grade(texts())
        judged = {
            (row["row_index"], row[SAMPLE_COLUMN]): self._holds(row, grades)
            for row, grades in zip(rows, graded, strict=False)
        }
        return [
            row._replace(valid=judged.get((row.row_index, row.sample_index))) for row in finished
        ]

    def _holds(self, row: Mapping[str, Any], grades: Mapping[str, Any]) -> bool | None:
        try:
            return self._where.is_valid(row, grades)
        except ExpressionFailed as error:
            if not self._has_warned:
                self._has_warned = True
                print(
                    f"batchgen: warning: {error} (row {row['row_id']}, sample "
                    f"{row[SAMPLE_COLUMN]}): such samples count as not valid",
                    file=sys.stderr,
                )
            return None
