"""Which answers of other jobs become rows: no errors, those that hold, the best of each row."""

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
_KEPT = ("row_id", "finish_reason", *KEYS)


@dataclass(frozen=True)
class Chosen:
    """The answers of one job that become rows.

    Attributes:
        answers: [K] which answers, ascending.
        ends: [R] behind which of the K answers each row ends.
        failures: why an expression has no value in a row, by the row.
    """

    answers: Ints
    ends: Ints
    failures: dict[int, str]


@dataclass
class ReadPosition:
    """How far a choice has gone through the answers of a job: the number of the next answer, the
    key and the row of the last one, and the ids so far."""

    answer: int = 0
    key: int = -1
    row: int = -1
    ids: IdSet = field(default_factory=IdSet)


class AnswerSelector:
    """Chooses among the answers of jobs, and counts what it leaves out.

    Attributes:
        left: how many are left after each choice, by its name.
        examples: the first answers that `dataset.where` has left out, in words.
        num_errors: how many answers are errors.
    """

    def __init__(self, config: DatasetConfig, columns: JobColumns) -> None:
        """Compile the expressions; ConfigError if one of them is wrong."""
        self._config, self._columns = config, columns
        self.left: dict[str, int] = {}
        self.examples: list[str] = []
        self.num_errors = 0
        self._where = self._best = None
        if config.where is not None:
            self._where = columns.seen.expression("dataset.where", config.where)
        if config.best is not None:
            self._best = columns.seen.expression("dataset.best", config.best)
        used = [one for one in (self._where, self._best) if one is not None]
        wanted = reduce(or_, map(columns.seen.read_by, used), Wanted())
        self._rows, self._grades = columns.seen.ordered(wanted)
        self._json = {
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
        """How many answers there were, and what is left after each choice."""
        return tuple(Left(choice, rows) for choice, rows in self.left.items())

    def of(self, job: GradedShards, number: int, position: ReadPosition | None = None) -> Chosen:
        """The answers of the job with this number, from a place on, which is moved to the end of
        those that are there.

        Raises:
            ConfigError: `dataset.best` is no number, or the job has an id twice.
            JobError: its answers are not in order.
        """
        kept, rows, best = [np.empty(0, np.int64)], [np.empty(0, np.int64)], [np.empty(0)]
        failed: dict[int, str] = {}
        self._count("answers", 0)
        for first, keys, values in self._batches(job, number, position or ReadPosition()):
            is_error = pc.equal(keys["finish_reason"], "error").to_numpy()
            self.num_errors += int(is_error.sum())
            is_kept = ~is_error if self._config.errors == "drop" else np.ones(len(is_error), bool)
            self._count("answers", len(is_error))
            self._count("dataset.errors=drop", int(is_kept.sum()))
            value = np.zeros(len(is_kept))
            if self._where is not None or self._best is not None:
                for at in np.flatnonzero(is_kept).tolist():
                    fields = values[at]
                    try:
                        is_kept[at] = self._holds(fields)
                        value[at] = self._value(fields) if is_kept[at] else 0
                    except ExpressionFailed as error:
                        failed[first + at] = str(error)
            if self._where is not None:
                self._count("dataset.where", int(is_kept.sum()))
            kept.append(first + np.flatnonzero(is_kept))
            rows.append(np.asarray(keys["row_index"].to_numpy(), np.int64)[is_kept])
            best.append(value[is_kept])
        answers, ends = self._grouped(
            np.concatenate(kept), np.concatenate(rows), np.concatenate(best), failed
        )
        if self._config.rows != "samples":
            self._count(f"dataset.rows={self._config.rows}", len(ends))
        failures = dict[int, str]()
        for kept_at in np.flatnonzero(np.isin(answers, list(failed))).tolist():
            row = int(np.searchsorted(ends, kept_at, side="right"))
            failures.setdefault(row, failed[int(answers[kept_at])])
        return Chosen(answers, ends, failures)

    def _batches(
        self, job: GradedShards, number: int, at: ReadPosition
    ) -> Iterator[tuple[int, pa.Table, list[dict[str, Any]]]]:
        """All answers in order, which is checked: the number of the first of some, their keys, and
        what the expressions see of them."""
        places = {name: self._columns.places[name][number] for name in self._rows}
        columns = list(dict.fromkeys([*_KEPT, *places.values(), *job.id_columns]))
        for table, grades in job.answers(range(at.answer, job.total), columns, self._grades):
            keys = row_keys(table)
            if (np.diff(keys, prepend=at.key) <= 0).any():
                raise JobError(f"{job.user_path} is damaged: its answers are not in order")
            rows = np.asarray(table["row_index"].to_numpy(), np.int64)
            begins = np.flatnonzero(np.diff(rows, prepend=at.row))
            for row_id in job.ids(table).take(pa.array(begins)).to_pylist():
                if row_id is None or not at.ids.add(row_id):
                    raise ConfigError(
                        f"dataset.path: two rows of {job.user_path} have the id {row_id!r}: ids of "
                        "rows must differ"
                    )
            values = list[dict[str, Any]]()
            if self._where is not None or self._best is not None:
                seen = {name: table[place] for name, place in places.items()}
                own = {SAMPLE_INDEX: table[SAMPLE_INDEX], "row_id": table["row_id"]}
                values = with_grades(
                    pa.table({**own, **seen, "row_index": table["row_index"]}), grades
                ).to_pylist()
            for fields in values if self._json else ():
                fields |= {name: read(fields[name]) for name, read in self._json.items()}
            yield at.answer, table.select(_KEPT), values
            at.answer += table.num_rows
            at.key, at.row = int(keys[-1]), int(rows[-1])

    def _holds(self, fields: dict[str, Any]) -> bool:
        """Whether `dataset.where` holds in an answer; the first in which it does not are noted."""
        if self._where is None or self._where.is_true(fields):
            return True
        if len(self.examples) < _EXAMPLES:
            seen = {name: fields[name] for name in self._where.names}
            shown = ", ".join(f"{name}={value!r:.60}" for name, value in seen.items())
            called = f"{fields['row_id']}#{fields[SAMPLE_INDEX]}"
            self.examples.append(beginning(f"{called}: {shown}", 200))
        return False

    def _value(self, fields: dict[str, Any]) -> float:
        """The value of `dataset.best` in an answer; null and NaN are lower than all numbers."""
        value = 0.0 if self._best is None else self._best.value(fields)
        if value is None:
            return -math.inf
        if not isinstance(value, int | float):
            called = f"{fields['row_id']}#{fields[SAMPLE_INDEX]}"
            raise ConfigError(
                f"dataset.best: {self._config.best} is {value!r:.50} in the answer {called}: it "
                "must be a number or null"
            )
        return -math.inf if math.isnan(value) else float(value)

    def _grouped(
        self, answers: Ints, rows: Ints, values: npt.NDArray[np.float64], failed: dict[int, str]
    ) -> tuple[Ints, Ints]:
        """The answers that become rows, and where each row ends."""
        if self._config.rows == "samples":
            return answers, np.arange(1, len(answers) + 1)
        starts = np.flatnonzero(np.diff(rows, prepend=-1))
        ends = np.append(starts[1:], len(rows)) if len(rows) else starts
        if self._config.rows == "rows":
            return answers, ends
        # A row with an answer in which an expression fails is an error row: that answer stands.
        values[np.isin(answers, list(failed))] = math.inf
        tops = np.maximum.reduceat(values, starts) if len(starts) else values
        is_top = values == np.repeat(tops, np.diff(starts, append=len(rows)))
        tops_at = np.flatnonzero(is_top)
        firsts = tops_at[np.searchsorted(tops_at, starts)]
        return answers[firsts], np.arange(1, len(firsts) + 1)

    def _count(self, choice: str, rows: int) -> None:
        if choice == "dataset.errors=drop" and self._config.errors != "drop":
            return
        self.left[choice] = self.left.get(choice, 0) + rows
