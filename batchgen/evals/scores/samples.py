"""The graded samples of a job as one table, from its rows and their grades."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pyarrow as pa
import pyarrow.compute as pc

from batchgen.config.groups.job_config import ScoreConfig
from batchgen.evals.graders.step import MARK
from batchgen.evals.grades.folder_grades import JobGrades
from batchgen.evals.grades.grade_files import Part
from batchgen.evals.grades.grading_pass import Witness
from batchgen.evals.scores.marks import SAMPLES
from batchgen.storage.shards.checked_file import damaged, read_schema
from batchgen.storage.shards.enough import Enough
from batchgen.storage.shards.shard_files import read_columns
from batchgen.util.errors import ConfigError
from batchgen.util.shorten import some_names

_ANSWER_KEY = "answer_key"
_ROWS = ("row_id", "sample_index", "finish_reason", "error")
_MOST_KEPT = 2_000_000
"""Samples that are kept in memory (about 60 bytes each) while a job is graded."""


class Samples:
    """What scoring needs of the rows of a job.

    Samples of shards that `grades` makes are kept; the others are read when they are asked for.

    Attributes:
        grades: of the job.
        config: how the job is scored.
    """

    def __init__(self, job: Path, config: ScoreConfig) -> None:
        self.config = config
        self.grades = JobGrades(job, Witness(tuple(self._columns), self._keep))
        self._kept: dict[Part, pa.Table] = {}

    @property
    def have_marks(self) -> bool:
        """Whether the grades have marks, from which scores can be made."""
        schema = self.grades.schema()
        return schema is not None and MARK in schema.names

    def table(self) -> pa.Table:
        """The samples of all rows, with the columns `SAMPLES`.

        Of rows with `sampling.until` these are the first `valid` ones, which every row has. When
        the last samples come depends on their marks, so that scores of all would be biased.

        Raises:
            ConfigError: rows lack grades, no step gave marks, or there is no column of a name in
                `config`.
            JobError: a file is damaged.
        """
        parts = self.grades.finished()
        found = pa.concat_tables(
            self._kept[part] if part in self._kept else self._read(part) for part in parts
        )
        enough = Enough.of(read_schema(parts[0].shard).metadata)
        if enough is None:
            return found
        return found.filter(pc.less(found["sample_index"], enough.valid))

    @property
    def _columns(self) -> list[str]:
        """The columns of rows that are read."""
        named = [name for name in (self.config.subset, self.config.cluster) if name is not None]
        return list(dict.fromkeys([*_ROWS, *named]))

    def _keep(self, part: Part, rows: pa.Table, grades: pa.Table) -> None:
        if MARK not in grades.column_names:
            return
        if sum(map(len, self._kept.values())) + len(rows) <= _MOST_KEPT:
            self._kept[part] = self._samples(rows, grades)

    def _read(self, part: Part) -> pa.Table:
        names = read_schema(part.shard).names
        for key, name in {"subset": self.config.subset, "cluster": self.config.cluster}.items():
            if name is not None and name not in names:
                raise ConfigError(
                    f"score.{key}: the rows of {self.grades.job} have no column {name!r}: choose "
                    f"among {some_names(names)}"
                )
        rows = read_columns(part.shard, self._columns)
        return self._samples(rows, grades_of(part, rows))

    def _samples(self, rows: pa.Table, grades: pa.Table) -> pa.Table:
        if MARK not in grades.column_names:
            raise ConfigError(
                f"the grades of {self.grades.job} have no column {MARK!r}: add a step that gives "
                "marks, such as Grade"
            )
        # A judge's score has no answer to vote with, but a row that has one is not without answer.
        key = grades[_ANSWER_KEY if _ANSWER_KEY in grades.column_names else MARK]
        columns = {
            "row_id": rows["row_id"],
            "sample_index": rows["sample_index"],
            "mark": grades[MARK],
            "key": key,
            "truncated": pc.fill_null(pc.equal(rows["finish_reason"], "length"), False),
            "error": pc.struct_field(rows["error"], "type"),
            "grade_error": pc.struct_field(grades["grade_error"], "type"),
            "subset": _names(rows, self.config.subset),
            "cluster": _names(rows, self.config.cluster),
        }
        return pa.table({name: columns[name].cast(kind) for name, kind in SAMPLES.items()})


def graded_rows(job: Path) -> Iterator[pa.Table]:
    """The grades of each shard of a job whose rows are all graded.

    Raises:
        ConfigError: rows lack grades.
        JobError: a file is damaged.
    """
    for part in JobGrades(job).finished():
        yield grades_of(part, read_columns(part.shard, ["row_id"]))


def grades_of(part: Part, rows: pa.Table) -> pa.Table:
    """The grades of a shard with all their columns.

    Args:
        rows: of the shard.

    Raises:
        JobError: the part has other rows, or is damaged.
    """
    grades = read_columns(part.path, read_schema(part.path).names)
    if not grades["row_id"].equals(rows["row_id"]):
        raise damaged(part.path, "it has other rows than its shard")
    return grades


def _names(rows: pa.Table, column: str | None) -> pa.Array | pa.ChunkedArray:
    """The names of subsets or clusters; all null without a column for them."""
    if column is None:
        return pa.nulls(len(rows), pa.string())
    if pa.types.is_string(rows[column].type):
        return rows[column]
    values = rows[column].to_pylist()
    return pa.array([None if value is None else str(value) for value in values], pa.string())
