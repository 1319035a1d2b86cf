"""Chooses which answers of other jobs become rows, by the keys `errors`, `where`, `best` and `rows`
of `dataset=job`. `JobSource` uses `AnswerSelector`.

The answers of a job are numbered from 0, in the order of its rows and their samples. With
`rows=samples` each answer becomes a row, with `rows=rows` all answers of a row become one row of
lists, and with `best` the answer with the highest value stands for its row.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass, field
from functools import reduce
from operator import or_
from typing import Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc

from batchgen.config.groups.dataset_config import DatasetConfig
from batchgen.evals.grades.finished_shards import GradedShards
from batchgen.evals.grades.visible_columns import Wanted
from batchgen.inputs.dataset.row_ids import IdSet
from batchgen.inputs.dataset.source import Left
from batchgen.inputs.upstream.job_columns import SAMPLE_INDEX, JobColumns, with_grades
from batchgen.storage.shards.row_order import KEYS, row_keys
from batchgen.util.errors import ConfigError, JobError
from batchgen.util.shorten import beginning
from batchgen.util.templates.row_expression import ExpressionFailed
from batchgen.util.text.row_json import json_readers

Ints = npt.NDArray[np.int64]
_EXAMPLES = 3
"""The maximum number of examples of dropped answers."""
_KEPT = ("row_id", "finish_reason", *KEYS)
"""The columns that are read of all answers."""


@dataclass(frozen=True)
class Chosen:
    """The answers of one job that become rows: K answers for R rows.

    Attributes:
        answers: [K] the numbers of the answers in their job, ascending.
        ends: [R] where the answers of each row end: row r consists of answers[ends[r - 1]:ends[r]].
            If row 0 has the answers 0 and 2 and row 1 the answer 3, answers is [0, 2, 3] and ends
            is [2, 3].
        failures: for each row in which an expression has no value, the reason.
    """

    answers: Ints
    ends: Ints
    failures: dict[int, str]


@dataclass
class ReadPosition:
    """How far the answers of a job have been read.

    Attributes:
        answer: the number of the next answer.
        key: the sort key (`row_keys`) of the last answer; -1 before the first one.
        row: the row of the last answer; -1 before the first one.
        ids: the ids of all rows so far.
    """

    answer: int = 0
    key: int = -1
    row: int = -1
    ids: IdSet = field(default_factory=IdSet)


class AnswerSelector:
    """Chooses among the answers of jobs, and counts what it drops.

    Attributes:
        left: for each choice, by name, how many answers or rows are left after it.
        examples: texts that show the first answers that `dataset.where` has dropped.
        num_errors: how many answers are errors.
    """

    def __init__(self, config: DatasetConfig, columns: JobColumns) -> None:
        """Compile the expressions. Raises ConfigError if one is invalid."""
        self._config, self._columns = config, columns
        self.left: dict[str, int] = {}
        self.examples: list[str] = []
        self.num_errors = 0
        self._where = self._best = None
        if config.where is not None:
            self._where = columns.seen.expression("dataset.where", config.where)
        if config.best is not None:
            self._best = columns.seen.expression("dataset.best", config.best)
        expressions = [one for one in (self._where, self._best) if one is not None]
        wanted = reduce(or_, map(columns.seen.read_by, expressions), Wanted())
        # The columns of rows and of grades that the expressions read.
        self._rows, self._grades = columns.seen.ordered(wanted)
        self._json = {  # parse columns that hold JSON as text
            name: read
            for name in self._rows
            for read in json_readers(pa.schema([columns.fields[name]])).values()
        }

    @property
    def reads_grades(self) -> bool:
        """Whether an expression reads grades."""
        return bool(self._grades)

    @property
    def funnel(self) -> tuple[Left, ...]:
        """The number of answers, and how many are left after each choice."""
        return tuple(Left(choice, rows) for choice, rows in self.left.items())

    def of(self, job: GradedShards, number: int, position: ReadPosition | None = None) -> Chosen:
        """Choose among the answers of a job from `position` on, by default from the start. The
        position is moved to the end of the answers.

        Args:
            number: the job's index among the jobs that are read.

        Raises:
            ConfigError: `dataset.best` is no number, or two rows of the job have one id.
            JobError: the answers of the job are not in order.
        """
        # A first empty array each, so that they can be concatenated if there is no batch.
        kept, rows, kept_scores = [np.empty(0, np.int64)], [np.empty(0, np.int64)], [np.empty(0)]
        failed: dict[int, str] = {}
        self._count("answers", 0)
        for first, keys, values in self._batches(job, number, position or ReadPosition()):
            is_error = pc.equal(keys["finish_reason"], "error").to_numpy()
            self.num_errors += int(is_error.sum())
            is_kept = ~is_error if self._config.errors == "drop" else np.ones(len(is_error), bool)
            self._count("answers", len(is_error))
            self._count("dataset.errors=drop", int(is_kept.sum()))
            scores = np.zeros(len(is_kept))
            if self._where is not None or self._best is not None:
                for index in np.flatnonzero(is_kept).tolist():
                    fields = values[index]
                    try:
                        is_kept[index] = self._holds(fields)
                        scores[index] = self._value(fields) if is_kept[index] else 0
                    except ExpressionFailed as error:
                        failed[first + index] = str(error)
            if self._where is not None:
                self._count("dataset.where", int(is_kept.sum()))
            kept.append(first + np.flatnonzero(is_kept))
            rows.append(np.asarray(keys["row_index"].to_numpy(), np.int64)[is_kept])
            kept_scores.append(scores[is_kept])
        answers, ends = self._grouped(
            np.concatenate(kept), np.concatenate(rows), np.concatenate(kept_scores), failed
        )
        if self._config.rows != "samples":
            self._count(f"dataset.rows={self._config.rows}", len(ends))
        failures = dict[int, str]()
        for index in np.flatnonzero(np.isin(answers, list(failed))).tolist():
            row = int(np.searchsorted(ends, index, side="right"))
            failures.setdefault(row, failed[int(answers[index])])
        return Chosen(answers, ends, failures)

    def _batches(
        self, job: GradedShards, number: int, position: ReadPosition
    ) -> Iterator[tuple[int, pa.Table, list[dict[str, Any]]]]:
        """Yield the answers from a position on, in batches: the number of the first answer, the
        columns _KEPT of all, and for each answer the columns that expressions read. Moves the
        position forward.

        Raises:
            ConfigError: two rows have one id.
            JobError: answers are not in order.
        """
        columns_of = {name: self._columns.source_names[name][number] for name in self._rows}
        columns = list(dict.fromkeys([*_KEPT, *columns_of.values(), *job.id_columns]))
        for table, grades in job.answers(range(position.answer, job.total), columns, self._grades):
            keys = row_keys(table)  # ascending from row to row, and from sample to sample
            if (np.diff(keys, prepend=position.key) <= 0).any():
                raise JobError(f"{job.user_path} is damaged: its answers are not in order")
            rows = np.asarray(table["row_index"].to_numpy(), np.int64)
            begins = np.flatnonzero(np.diff(rows, prepend=position.row))  # of each new row
            for row_id in job.ids(table).take(pa.array(begins)).to_pylist():
                if row_id is None or not position.ids.add(row_id):
                    raise ConfigError(
                        f"dataset.path: two rows of {job.user_path} have the id {row_id!r}: ids of "
                        "rows must differ"
                    )
            values = list[dict[str, Any]]()
            if self._where is not None or self._best is not None:
                read = {name: table[column] for name, column in columns_of.items()}
                keys_of_answer = {SAMPLE_INDEX: table[SAMPLE_INDEX], "row_id": table["row_id"]}
                values = with_grades(
                    pa.table({**keys_of_answer, **read, "row_index": table["row_index"]}), grades
                ).to_pylist()
            for fields in values if self._json else ():
                fields |= {name: read(fields[name]) for name, read in self._json.items()}
            yield position.answer, table.select(_KEPT), values
            position.answer += table.num_rows
            position.key, position.row = int(keys[-1]), int(rows[-1])

    def _holds(self, fields: dict[str, Any]) -> bool:
        """Return whether `dataset.where` is true for an answer. If it is not, the answer may become
        an example."""
        if self._where is None or self._where.is_true(fields):
            return True
        if len(self.examples) < _EXAMPLES:
            read = {name: fields[name] for name in self._where.names}
            text = ", ".join(f"{name}={value!r:.60}" for name, value in read.items())
            answer = f"{fields['row_id']}#{fields[SAMPLE_INDEX]}"
            self.examples.append(beginning(f"{answer}: {text}", 200))
        return False

    def _value(self, fields: dict[str, Any]) -> float:
        """Return the value of `dataset.best` for an answer. Null and NaN become -inf."""
        value = 0.0 if self._best is None else self._best.value(fields)
        if value is None:
            return -math.inf
        if not isinstance(value, int | float):
            answer = f"{fields['row_id']}#{fields[SAMPLE_INDEX]}"
            raise ConfigError(
                f"dataset.best: {self._config.best} is {value!r:.50} in the answer {answer}: it "
                "must be a number or null"
            )
        return -math.inf if math.isnan(value) else float(value)

    def _grouped(
        self, answers: Ints, rows: Ints, values: npt.NDArray[np.float64], failed: dict[int, str]
    ) -> tuple[Ints, Ints]:
        """Return `Chosen.answers` and `Chosen.ends`.

        Args:
            answers: [A] the numbers of the answers that are left.
            rows: [A] their rows.
            values: [A] the values of `dataset.best`.
            failed: the answers in which an expression has no value, and why.
        """
        if self._config.rows == "samples":
            return answers, np.arange(1, len(answers) + 1)
        starts = np.flatnonzero(np.diff(rows, prepend=-1))  # [R], the first answer of each row
        ends = np.append(starts[1:], len(rows)) if len(rows) else starts
        if self._config.rows == "rows":
            return answers, ends
        # An answer in which an expression fails is chosen, so that its row becomes an error row.
        values[np.isin(answers, list(failed))] = math.inf
        highest = np.maximum.reduceat(values, starts) if len(starts) else values
        is_highest = values == np.repeat(highest, np.diff(starts, append=len(rows)))
        candidates = np.flatnonzero(is_highest)
        # The first of the highest answers of each row.
        firsts = candidates[np.searchsorted(candidates, starts)]
        return answers[firsts], np.arange(1, len(firsts) + 1)

    def _count(self, choice: str, rows: int) -> None:
        """Add to the number of answers or rows that are left after a choice."""
        if choice == "dataset.errors=drop" and self._config.errors != "drop":
            return
        self.left[choice] = self.left.get(choice, 0) + rows
