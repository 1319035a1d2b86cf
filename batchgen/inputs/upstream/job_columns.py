"""The columns of other jobs' rows: their names in the job that reads them, and where each comes
from. `job_columns` finds them for `JobSource`.

A shard of a job has, in this order: the keys of a row (row_id, row_index, sample_index), the
columns that were copied from the data set, the generated text, and other columns of the output.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass
from functools import cached_property

import pyarrow as pa

from batchgen.config.groups.dataset_config import DatasetConfig
from batchgen.evals.grades.visible_columns import GRADES, VisibleColumns
from batchgen.inputs.dataset.dataset_columns import renamed
from batchgen.inputs.upstream.followed_job import ReadableJob
from batchgen.storage.shards.column_kinds import is_per_token
from batchgen.storage.shards.row_order import KEYS
from batchgen.util.errors import ConfigError

SOURCE = "source"
"""The output column that names the answer from which a row was made."""
SAMPLE_INDEX = "sample_index"
"""The variable that expressions over an answer have besides its columns."""
_SOURCE_MARK = b"batchgen.source"
"""The metadata key of the column SOURCE, by which it is known from a user's column of this name."""
SOURCE_FIELD = pa.field(
    SOURCE,
    pa.struct([("row_id", pa.string()), ("sample_index", pa.int32()), ("digest", pa.string())]),
    metadata={
        "meaning": (
            "the answer of another job that the row was made from: its row, its sample (null for "
            "all samples) and a digest of its text"
        ),
        _SOURCE_MARK.decode(): "1",
    },
)


@dataclass(frozen=True)
class JobColumns:
    """The columns of other jobs, by the names that they have in the job that reads them.

    Attributes:
        fields: all columns of the rows, in the order of the files.
        source_names: for each name, the column's name in each of the jobs.
        passthrough: the columns that the other jobs copied from their data sets.
        by_token: the columns with a value per token, which are read only if they are named.
        text: the column of generated text.
        grades: the columns of the grades.
    """

    fields: dict[str, pa.Field]
    source_names: dict[str, tuple[str, ...]]
    passthrough: tuple[str, ...]
    by_token: frozenset[str]
    text: str
    grades: dict[str, pa.Field]

    @property
    def flat(self) -> dict[str, pa.Field]:
        """All columns of the rows, and the grades whose names differ from these."""
        free = {name: field for name, field in self.grades.items() if name not in self.fields}
        return {**self.fields, **free}

    @cached_property
    def seen(self) -> VisibleColumns:
        """The columns that templates and expressions can use, and SAMPLE_INDEX for expressions over
        an answer."""
        return VisibleColumns([*self.fields], [*self.grades], (SAMPLE_INDEX,))

    def read(self, names: Collection[str] | None) -> tuple[list[str], list[str]]:
        """Return which columns of the rows and of the grades must be read if these names are used.
        None stands for all names."""
        if names is None:
            names = [name for name in self.seen.names if name not in self.by_token]
        return self.seen.ordered(self.seen.named(names))


def with_grades(table: pa.Table, grades: pa.Table) -> pa.Table:
    """Return the table with the columns of the grades added: all as the struct GRADES, and each by
    its name if the table has no such column."""
    names = grades.column_names
    if not names:
        return table
    columns = [grades[name].combine_chunks() for name in names]
    for name in names:
        if name not in table.column_names:
            table = table.append_column(name, grades[name])
    return table.append_column(GRADES, pa.StructArray.from_arrays(columns, names))


def job_columns(jobs: Sequence[ReadableJob], config: DatasetConfig) -> JobColumns:
    """Find the columns that all the jobs have.

    Raises:
        ConfigError: the jobs copy different columns of their data sets or have different names for
            the text, `dataset.rename` names an unknown column, or two columns have one name.
    """
    per_job = [_of_job(job, config) for job in jobs]
    first = per_job[0]
    for job, other in zip(jobs, per_job, strict=True):
        _check_passthrough(jobs[0], first, job, other, config)
    if len({other.text for other in per_job}) > 1:
        texts = ", ".join(dict.fromkeys(other.text for other in per_job))
        raise ConfigError(
            f"dataset.path: the jobs have different names for the generated text ({texts}): give "
            "it one with dataset.text_as=NAME"
        )
    shared = {
        name: field
        for name, field in first.fields.items()
        if all(name in o.fields and o.fields[name].type == field.type for o in per_job)
    }
    grades = {
        name: field
        for name, field in first.grades.items()
        if all(name in o.grades and o.grades[name].type == field.type for o in per_job)
    }
    if grades and GRADES in shared:
        raise ConfigError(
            f"dataset: the column {GRADES!r} has the name of the grades: rename it with "
            f"'dataset.rename={{{GRADES}: NAME}}'"
        )
    return JobColumns(
        shared,
        {name: tuple(o.source_names[name][0] for o in per_job) for name in shared},
        tuple(name for name in first.passthrough if name in shared),
        first.by_token & shared.keys(),
        first.text,
        grades,
    )


def _of_job(job: ReadableJob, config: DatasetConfig) -> JobColumns:
    """Return the columns of one job."""
    fields = [field for field in job.schema if field.name not in ("row_id", *KEYS)]
    old_names, text = [field.name for field in fields], job.text_column
    names = renamed(_new_names(job, config, old_names), old_names)
    copied = job.schema.names[: job.schema.names.index(text)]
    passthrough = [
        field for field in fields if field.name in copied and _SOURCE_MARK not in _metadata(field)
    ]
    return JobColumns(
        {names[field.name]: field for field in fields},
        {names[old_name]: (old_name,) for old_name in old_names},
        tuple(names[field.name] for field in passthrough),
        frozenset(names[field.name] for field in fields if is_per_token(field)),
        names[text],
        {field.name: field for field in job.grade_schema},
    )


def _new_names(job: ReadableJob, config: DatasetConfig, columns: Sequence[str]) -> dict[str, str]:
    """Return the new names of columns, by `dataset.rename` and `dataset.text_as`."""
    rename, text_as = dict(config.rename or {}), config.text_as
    if fixed := [name for name in (*rename.values(), text_as) if name in ("row_id", *KEYS)]:
        raise ConfigError(
            f"dataset: no column can be called {fixed[0]!r}, which every row of a job has: choose "
            "another name"
        )
    if text_as is None or text_as == job.text_column:
        return rename
    if job.text_column in rename:
        raise ConfigError(
            f"dataset.rename: {job.text_column!r} is the generated text, which dataset.text_as "
            "names: leave it out of one of the two"
        )
    if text_as in columns and text_as not in rename:
        raise ConfigError(
            f"dataset.text_as={text_as} is the name of another column of {job.user_path}: choose "
            f"another name, or rename that column ('dataset.rename={{{text_as}: NAME}}')"
        )
    return {**rename, job.text_column: text_as}


def _check_passthrough(
    first_job: ReadableJob,
    first: JobColumns,
    job: ReadableJob,
    other: JobColumns,
    config: DatasetConfig,
) -> None:
    """Raise ConfigError if two jobs copy different columns of their data sets, unless
    `dataset.columns` says which to copy."""
    ours = {name: first.fields[name].type for name in first.passthrough}
    theirs = {name: other.fields[name].type for name in other.passthrough}
    names = [*dict.fromkeys([*ours, *theirs])]
    differing = [name for name in names if ours.get(name) != theirs.get(name)]
    if not differing or config.columns is not None:
        return
    name, shared = differing[0], ",".join(name for name in names if name not in differing)
    raise ConfigError(
        f"dataset.path: the column {name!r} is {ours.get(name, 'absent')} in "
        f"{first_job.user_path} and {theirs.get(name, 'absent')} in {job.user_path}: choose the "
        f"columns to copy among those that they share ('dataset.columns=[{shared}]')"
    )


def _metadata(field: pa.Field) -> dict[bytes, bytes]:
    return field.metadata or {}
