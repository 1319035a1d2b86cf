"""Decides the columns of a *set*, the data set that `select` makes of rows of finished jobs, and
writes its rows in any order with bounded memory. `select` uses `set_columns`, `set_schema` and
`set_tables`, in this order."""

from __future__ import annotations

import tempfile
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa

from batchgen.evals.grades.grade_files import ROW_KEYS
from batchgen.evals.grades.visible_columns import Wanted
from batchgen.pipelines.publish.chosen_rows import WriteOrder
from batchgen.pipelines.publish.data_folder import ROWS_PER_SHARD
from batchgen.pipelines.publish.finished_rows import FinishedRows
from batchgen.util.errors import ConfigError
from batchgen.util.shorten import some_names
from batchgen.util.text.row_json import AS_GIVEN

ID, SOURCE = "id", "source"
INPUT_ID = "input_id"
"""The name in the set for a data set's column `id` that does not hold the rows' ids."""
SOURCE_TYPE = pa.struct(
    [("job", pa.string()), ("row_id", pa.string()), ("sample_index", pa.int32())]
)
_BUCKETS = 256
"""The number of shards that are filled in one pass over the rows."""
_KEYS = ("row_id", "sample_index")


@dataclass(frozen=True)
class SetColumns:
    """The columns that a set takes from one job.

    Attributes:
        name: the job's folder, as the user typed it.
        data: name in the set → name in the rows.
        grades: name in the set → name in the grades.
        one_of_a_row: whether at most one sample of each input row is taken. Otherwise ids end with
            the number of the sample.
        prefix: the text with which ids begin.
        has_source: whether the set's column SOURCE is written, because no column of the job has
            that name.
    """

    name: str
    data: dict[str, str]
    grades: dict[str, str]
    one_of_a_row: bool
    prefix: str
    has_source: bool

    def fields(self, job: FinishedRows) -> list[pa.Field]:
        """Return the fields of the set that this job fills."""
        fields = [job.schema.field(old).with_name(new) for new, old in self.data.items()]
        graded = self.grades.items()
        return fields + [job.grade_schema.field(old).with_name(new) for new, old in graded]

    @property
    def wanted(self) -> Wanted:
        return Wanted(frozenset([*self.data.values(), *_KEYS]), frozenset(self.grades.values()))


def set_columns(
    job: FinishedRows, *, named: Sequence[str] | None, text_as: str, one_of_a_row: bool, prefix: str
) -> SetColumns:
    """Choose the columns that a set takes from a job.

    Args:
        named: the names; None for the data set's columns, the generated text, and the grades.
        text_as: the name of the generated text in the set.

    Raises:
        ConfigError: a name is unknown, or two columns would have the same name.
    """
    if job.is_set:
        raise ConfigError(
            f"select reads jobs, and {job.user_path} is a set: give the jobs themselves"
        )
    chosen = _chosen(job, named)
    data: dict[str, str] = {}
    grades: dict[str, str] = {}
    for name, is_grade in chosen:
        new = text_as if name == job.text_column and not is_grade else name
        if name == ID and not is_grade:
            if job.group("dataset").get("id_column") == ID:
                continue  # the ids of the set have the same content
            new = INPUT_ID
        if is_grade and new in data:
            new = f"grades_{name}"
        if new in data or new in grades or new == ID:
            raise ConfigError(
                f"the set would have two columns {new!r}: name the generated text otherwise with "
                "--text-as, or choose columns with --columns"
            )
        (grades if is_grade else data)[new] = name
    has_source = SOURCE not in data and SOURCE not in grades
    return SetColumns(job.user_path, data, grades, one_of_a_row, prefix, has_source)


def _chosen(job: FinishedRows, named: Sequence[str] | None) -> list[tuple[str, bool]]:
    """Return the name of each column to take, and whether it is a column of the grades."""
    rows, grades = job.schema.names, job.columns.grades
    if named is None:
        # Rows begin with ROW_KEYS, then the data set's columns, then the generated text. Columns
        # from the data set that come later are known by their meaning.
        text = rows.index(job.text_column)
        defaults = [
            field.name
            for index, field in enumerate(job.schema)
            if (field.metadata or {}).get(b"meaning") == AS_GIVEN or len(ROW_KEYS) <= index < text
        ]
        return [*((n, False) for n in (*defaults, job.text_column)), *((n, True) for n in grades)]
    chosen = []
    for name in named:
        bare = name.removeprefix("grades.")
        if name in rows:
            chosen.append((name, False))
        elif bare in grades:
            chosen.append((bare, True))
        else:
            raise ConfigError(
                f"--columns: {job.user_path} has no column {name!r}: choose among "
                f"{some_names(job.columns.names, name)}"
            )
    return chosen


def set_schema(jobs: Sequence[FinishedRows], columns: Sequence[SetColumns]) -> pa.Schema:
    """The schema of a set. Raises ConfigError if a column has different types in two jobs, or if a
    job's own column SOURCE has another type than the set's, which other jobs fill."""
    fields: dict[str, pa.Field] = {
        ID: pa.field(ID, pa.string(), metadata={"meaning": "row and sample of the job"})
    }
    for job, taken in zip(jobs, columns, strict=True):
        for field in taken.fields(job):
            known = fields.setdefault(field.name, field)
            if known.type != field.type:
                raise ConfigError(
                    f"column {field.name!r} is {known.type} in {jobs[0].user_path} and "
                    f"{field.type} in {job.user_path}: choose columns with --columns"
                )
    without = [taken.name for taken in columns if taken.has_source]
    if SOURCE not in fields:
        meaning = {"meaning": "job, row and sample that the row came from"}
        fields[SOURCE] = pa.field(SOURCE, SOURCE_TYPE, metadata=meaning)
    elif without and fields[SOURCE].type != SOURCE_TYPE:
        owner = next(taken.name for taken in columns if not taken.has_source)
        raise ConfigError(
            f"{owner} has a column {SOURCE!r}, and for rows of {without[0]} the set's column of "
            "that name says where they came from: choose columns with --columns"
        )
    return pa.schema(list(fields.values()))


def set_tables(
    jobs: Sequence[FinishedRows],
    columns: Sequence[SetColumns],
    order: WriteOrder,
    schema: pa.Schema,
) -> Iterator[pa.Table]:
    """Yield the rows in the order in which they are written, one table per shard of the set.

    The jobs' files are read in order. Each row goes to the temporary file of its shard, and each
    file is sorted when it is complete.
    """
    for start in range(0, len(order), _BUCKETS * ROWS_PER_SHARD):
        stop = min(start + _BUCKETS * ROWS_PER_SHARD, len(order))
        with tempfile.TemporaryDirectory(prefix="batchgen-select-") as folder:
            buckets = [_Bucket(Path(folder, str(i)), schema) for i in range(_BUCKETS)]
            ranks = np.arange(start, stop)
            for table, table_ranks in _located(jobs, columns, order, ranks, schema):
                bucket_of = (table_ranks - start) // ROWS_PER_SHARD
                for number in np.unique(bucket_of):
                    indices = np.flatnonzero(bucket_of == number)
                    buckets[number].add(table.take(pa.array(indices)), table_ranks[indices])
            for bucket in buckets:
                if bucket.ranks:
                    yield bucket.table()


class _Bucket:
    """The rows of one shard of a set, collected in a temporary file. The rank of a row is its index
    in the set."""

    def __init__(self, path: Path, schema: pa.Schema) -> None:
        self._path, self._schema = path, schema
        self._writer: Any = None
        self.ranks: list[Any] = []

    def add(self, table: pa.Table, ranks: Any) -> None:
        if self._writer is None:
            self._writer = pa.ipc.new_stream(str(self._path), self._schema)
        self._writer.write_table(table)
        self.ranks.append(ranks)

    def table(self) -> pa.Table:
        """Return all rows, sorted by rank, and delete the file."""
        self._writer.close()
        with pa.ipc.open_stream(str(self._path)) as reader:
            table = reader.read_all()
        self._path.unlink()
        return table.take(pa.array(np.argsort(np.concatenate(self.ranks))))


def _located(
    jobs: Sequence[FinishedRows],
    columns: Sequence[SetColumns],
    order: WriteOrder,
    ranks: Any,
    schema: pa.Schema,
) -> Iterator[tuple[pa.Table, Any]]:
    """Read the rows with these ranks, in the order of the jobs' files. Yields tables, each with the
    ranks of its rows."""
    # `order` has an array for each part of a row's place (job, shard, position), by rank.
    keys = np.stack([order.job[ranks], order.shard[ranks]], axis=1)
    for number, shard in np.unique(keys, axis=0).tolist():
        shard_ranks = ranks[(keys[:, 0] == number) & (keys[:, 1] == shard)]
        shard_ranks = shard_ranks[np.argsort(order.position[shard_ranks], kind="stable")]
        job, taken, num_read = jobs[number], columns[number], 0
        names = job.columns.ordered(taken.wanted)
        for rows, grades in job.tables(shard, *names, order.position[shard_ranks]):
            yield _table(rows, grades, taken, schema), shard_ranks[num_read : num_read + len(rows)]
            num_read += len(rows)


def _table(batch: pa.Table, grades: pa.Table, taken: SetColumns, schema: pa.Schema) -> pa.Table:
    """Convert rows of a job to rows of the set."""
    ids = batch["row_id"].to_pylist()
    samples = batch["sample_index"].to_pylist()
    columns: dict[str, Any] = {new: batch[old] for new, old in taken.data.items()}
    columns |= {new: grades[old] for new, old in taken.grades.items()}
    ends = [""] * len(ids) if taken.one_of_a_row else [f"#{sample}" for sample in samples]
    pairs = zip(ids, ends, strict=True)
    columns[ID] = pa.array([f"{taken.prefix}{row}{end}" for row, end in pairs])
    if taken.has_source:
        parts = [pa.array([taken.name] * len(ids)), pa.array(ids), pa.array(samples, pa.int32())]
        columns[SOURCE] = pa.StructArray.from_arrays(parts, fields=list(SOURCE_TYPE))
    arrays = [
        columns[field.name] if field.name in columns else pa.nulls(len(ids), field.type)
        for field in schema
    ]
    return pa.table(arrays, schema=schema)
