"""Reads the graded samples of a job as one table, from its rows and their grades. `SAMPLES` in
`marks.py` lists its columns, and `Marks` computes scores from it."""

from __future__ import annotations

import json
from collections.abc import Iterator
from functools import cached_property
from pathlib import Path

import pyarrow as pa
import pyarrow.compute as pc

from batchgen.config.groups.class_names import class_short_name
from batchgen.config.groups.output_config import ScoreConfig
from batchgen.evals.graders.step import MARK
from batchgen.evals.grades.folder_grades import JobGrades
from batchgen.evals.grades.grade_files import GradePart
from batchgen.evals.grades.grading_pass import Witness
from batchgen.evals.scores.marks import SAMPLES
from batchgen.storage.shards.checked_file import damaged, read_schema
from batchgen.storage.shards.enough import VALID, Enough
from batchgen.storage.shards.shard_files import read_columns
from batchgen.util.errors import ConfigError
from batchgen.util.shorten import some_names

# The column of grades with the answer in a normal form, in which votes are counted.
_ANSWER_KEY = "answer_key"
_CHOICES = "choices"
_ROWS = ("row_id", "sample_index", "finish_reason", "error")
_MOST_KEPT = 2_000_000
"""The most samples that are kept in memory (about 60 bytes each) while a job is graded."""


class Samples:
    """Provides the samples of a job to scoring.

    Samples of shards that are graded in this process are kept in memory; the others are read when
    needed.

    Attributes:
        grades: the grades of the job.
        config: the options of scoring.
        by: a further column of `table`, None for none.
    """

    def __init__(self, job: Path, config: ScoreConfig, *, by: str | None = None) -> None:
        """Open the samples; `by` names a column that `table` has in addition, as texts."""
        self.config, self.by = config, by
        witness = Witness(tuple(self.columns), self._keep) if config.column == MARK else None
        self.grades = JobGrades(job, witness)
        self._kept: dict[GradePart, pa.Table] = {}

    @property
    def have_marks(self) -> bool:
        """Whether rows or grades have the column from which scores are computed."""
        column, schema = self.config.column, self.grades.schema()
        if schema is not None and column in schema.names:
            return True
        parts = self.grades.parts() if column != MARK else iter(())
        return any(column in read_schema(part.shard).names for part in parts)

    def table(self) -> pa.Table:
        """The samples of all rows, with the columns `SAMPLES`, and `by` if that was given.

        With `sampling.until.valid`, only the first `valid` samples of each row are taken, which
        every row has: when the last samples come depends on their marks, so scores of all samples
        would be biased. With `sampling.until.width`, all samples are taken, and the table's
        metadata have the rule.

        Raises:
            ConfigError: rows lack grades, no step gave marks, or a column named in `config` does
                not exist.
            JobError: a file is damaged.
        """
        grades = self.grades
        # Numbers that rows have themselves need no grades.
        ungraded = self.config.column != MARK and grades.steps is None
        parts = list(grades.parts()) if ungraded else grades.finished()
        if not parts:
            raise ConfigError(f"{grades.job} has no rows to score")
        table = pa.concat_tables(
            self._kept[part] if part in self._kept else self.part(part, graded=not ungraded)
            for part in parts
        )
        enough = Enough.of(read_schema(parts[0].shard).metadata)
        if enough is None:
            return table
        if enough.valid is None:
            return table.replace_schema_metadata(enough.metadata)
        return table.filter(pc.less(table["sample_index"], enough.valid))

    @property
    def columns(self) -> list[str]:
        """The columns of rows that are read."""
        config = self.config
        keys = (config.subset, config.cluster, config.choices, self.by)
        named: list[str] = [name for name in keys if name is not None]
        return list(dict.fromkeys([*_ROWS, *named]))

    @cached_property
    def _choices(self) -> str | None:
        """The column with the choices of a question, if answers are marked by the chosen letter."""
        if self.config.choices is not None or self.config.column != MARK:
            return self.config.choices
        steps = json.loads(self.grades.steps or "[]")
        grade = [step for step in steps if class_short_name(step["_target_"]) == "Grade"]
        return _CHOICES if any(step.get("method") == "choice" for step in grade) else None

    def _keep(self, part: GradePart, rows: pa.Table, grades: pa.Table) -> None:
        """Keep the samples of a part that was just graded, if these rows and grades have all that
        they need."""
        if MARK not in grades.column_names or self._choices not in (None, self.config.choices):
            return
        if self._valid_of(part) is not None:  # a column that is not read here
            return
        if sum(map(len, self._kept.values())) + len(rows) <= _MOST_KEPT:
            self._kept[part] = self.joined(rows, grades)

    def part(self, part: GradePart, *, graded: bool = True) -> pa.Table:
        """The samples of a shard: `graded`, or with numbers of the rows alone."""
        names, config = read_schema(part.shard).names, self.config
        for key, name in {
            "score.subset": config.subset,
            "score.cluster": config.cluster,
            "score.choices": config.choices,
            "--by": self.by,
        }.items():
            if name is not None and name not in names:
                raise ConfigError(
                    f"{key}: the rows of {self.grades.job} have no column {name!r}: choose "
                    f"among {some_names(names)}"
                )
        valid = self._valid_of(part)
        wanted = [*self.columns, *([] if valid is None else [valid])]
        wanted += [name for name in (config.column, self._choices) if name and name in names]
        rows = read_columns(part.shard, list(dict.fromkeys(wanted)))
        grades = grades_of(part, rows) if graded else rows.select([])
        return self.joined(rows, grades, valid)

    @staticmethod
    def _valid_of(part: GradePart) -> str | None:
        """The column that says which samples are valid; None unless the rows ended by a rule about
        the width of an interval."""
        enough = Enough.of(read_schema(part.shard).metadata)
        return None if enough is None or enough.width is None else VALID

    def joined(self, rows: pa.Table, grades: pa.Table, valid: str | None = None) -> pa.Table:
        """The samples of some rows with their grades, in the form of `table`. `valid` is the column
        that says which samples are valid, if a rule reads it."""
        values = self._values(rows, grades)
        # A judge's score has no answer to vote with, but a row that has one is not without answer.
        is_key = self.config.column == MARK and _ANSWER_KEY in grades.column_names
        key = grades[_ANSWER_KEY] if is_key else values
        errors = {"error": rows["error"], "grade_error": pa.nulls(len(rows), rows["error"].type)}
        if "grade_error" in grades.column_names:
            errors["grade_error"] = grades["grade_error"]
        columns = {
            "row_id": rows["row_id"],
            "sample_index": rows["sample_index"],
            "mark": values,
            "key": key,
            "truncated": pc.fill_null(pc.equal(rows["finish_reason"], "length"), fill_value=False),
            **{name: pc.struct_field(error, "type") for name, error in errors.items()},
            "subset": _names(rows, self.config.subset),
            "cluster": _names(rows, self.config.cluster),
            "choices": self._num_choices(rows),
            VALID: pa.nulls(len(rows), pa.bool_()) if valid is None else rows[valid],
        }
        table = {name: columns[name].cast(kind) for name, kind in SAMPLES.items()}
        return pa.table(table | ({} if self.by is None else {self.by: _names(rows, self.by)}))

    def _values(self, rows: pa.Table, grades: pa.Table) -> pa.ChunkedArray:
        """The marks, or the numbers of the chosen column; null for numbers that are not finite."""
        column = self.config.column
        # A mark that rows have themselves is of the job that they were copied from.
        tables = (grades,) if column == MARK else (grades, rows)
        table = next((t for t in tables if column in t.column_names), None)
        if table is None and column == MARK:
            raise ConfigError(
                f"the grades of {self.grades.job} have no column {MARK!r}: add a step that gives "
                "marks, such as Grade, or name another column of numbers, such as "
                f"score.column={_first_score(grades)}"
            )
        if table is None or column not in _numeric(table):
            names = [*_numeric(grades), *_numeric(rows)]
            why = (
                f"have no column {column!r}" if table is None else f"have no numbers in {column!r}"
            )
            raise ConfigError(
                f"score.column: the rows and grades of {self.grades.job} {why}: choose among "
                f"{some_names(names, column)}"
            )
        values = _single(table[column]).cast(pa.float64())
        return values if column == MARK else pc.if_else(pc.is_finite(values), values, None)

    def _num_choices(self, rows: pa.Table) -> pa.Array | pa.ChunkedArray:
        """The number of choices of each question; null if it is not known."""
        name = self._choices
        if name is None or name not in rows.column_names:
            return pa.nulls(len(rows), pa.int64())
        kind = rows[name].type
        if not (pa.types.is_list(kind) or pa.types.is_large_list(kind)):
            return pa.nulls(len(rows), pa.int64())
        return pc.list_value_length(rows[name])


def graded_rows(job: Path) -> Iterator[pa.Table]:
    """The grades of each shard of a job whose rows are all graded.

    Raises:
        ConfigError: rows lack grades.
        JobError: a file is damaged.
    """
    for part in JobGrades(job).finished():
        yield grades_of(part, read_columns(part.shard, ["row_id"]))


def grades_of(part: GradePart, rows: pa.Table) -> pa.Table:
    """The grades of a shard with all their columns.

    Args:
        rows: the rows of the shard.

    Raises:
        JobError: the grades are of other rows, or damaged.
    """
    grades = read_columns(part.path, read_schema(part.path).names)
    if not grades["row_id"].equals(rows["row_id"]):
        raise damaged(part.path, "it has other rows than its shard")
    return grades


def _names(rows: pa.Table, column: str | None) -> pa.Array | pa.ChunkedArray:
    """The names of subsets or clusters, from a column; all null if there is no such column."""
    if column is None:
        return pa.nulls(len(rows), pa.string())
    if pa.types.is_string(rows[column].type):
        return rows[column]
    values = rows[column].to_pylist()
    return pa.array([None if value is None else str(value) for value in values], pa.string())


def _first_score(grades: pa.Table) -> str:
    """The first column of grades with floating-point numbers; otherwise a column that all rows
    have."""
    floats = (f.name for f in grades.schema if pa.types.is_floating(f.type))
    return next(floats, "num_generated_tokens")


def _numeric(table: pa.Table) -> list[str]:
    """The columns of a table that hold numbers or booleans."""
    kinds = (pa.types.is_integer, pa.types.is_floating, pa.types.is_boolean)

    def is_number(kind: pa.DataType) -> bool:
        if pa.types.is_fixed_size_list(kind) and kind.list_size == 1:
            kind = kind.value_type
        return any(is_kind(kind) for is_kind in kinds)

    return [field.name for field in table.schema if is_number(field.type)]


def _single(column: pa.ChunkedArray) -> pa.ChunkedArray:
    """A column of numbers, made from a column of lists of one number, such as a reward model's
    score."""
    if not pa.types.is_fixed_size_list(column.type):
        return column
    return pc.list_element(column, 0)
