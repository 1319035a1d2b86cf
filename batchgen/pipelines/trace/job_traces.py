"""Traces rows of jobs back to the rows from which they were made, through any number of jobs.
`trace_row` uses `JobTraces`."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq

from batchgen.config.groups.adapter_names import ADAPTER
from batchgen.config.groups.convert_value import build
from batchgen.config.groups.dataset_config import DatasetConfig
from batchgen.evals.grades.folder_grades import GRADES
from batchgen.evals.grades.grade_files import ROW_KEYS
from batchgen.pipelines.publish.finished_rows import FinishedRows, open_rows
from batchgen.pipelines.trace.source_places import jobs_at, source_place
from batchgen.pipelines.trace.traced import DropReason, Trace, TracedAnswers
from batchgen.storage.folder.open_folder import open_job_reader
from batchgen.storage.leases.job_files import ROWS
from batchgen.storage.shards.row_order import KEYS, ROW_COLUMN, SAMPLE_COLUMN
from batchgen.storage.shards.shard_files import read_columns, shard_path
from batchgen.storage.stores.manifest import runs_of_row
from batchgen.util.errors import ConfigError
from batchgen.util.templates.row_expression import ExpressionFailed

_MOST_JOBS = 100
"""The most jobs in a chain that are traced."""


class JobTraces:
    """Traces rows of one job.

    Args:
        user_path: the job's folder as the user typed it.
    """

    def __init__(self, user_path: str) -> None:
        """Open the job. Raises ConfigError if the folder is not a job's."""
        self.user_path = user_path
        self.reader = open_job_reader(user_path)
        dataset = self.reader.config.get("dataset")
        if not isinstance(dataset, dict):
            raise ConfigError(
                f"{user_path}/config.yaml does not say which data set the job has read"
            )
        self._dataset: Mapping[str, Any] = dataset

    def add(self, trace: Trace, row_id: str, sample: int | None = None) -> None:
        """Add to the trace the samples of a row and everything that they were made from. If the row
        is missing, add why it was dropped.

        Args:
            sample: the number of one sample; None for all.

        Raises:
            ConfigError: the job neither has the row nor knows why it was dropped.
            JobError: a file is damaged.
        """
        if len(trace.origins) > _MOST_JOBS:
            raise ConfigError(
                f"{self.user_path}: a chain of more than {_MOST_JOBS} jobs is not followed"
            )
        rows = [row for row in self._rows(row_id) if sample in (None, row[SAMPLE_COLUMN])]
        if not rows:
            self._add_dropped(trace, row_id)
            return
        facts = self.reader.row_facts
        steps = [] if facts is None else [step.short for step in facts.steps]
        grades = [self._grades(row) for row in rows]
        trace.origins.append(
            TracedAnswers(self.user_path, rows, grades, steps, self.reader.text_column)
        )
        self._add_source(trace, rows[0])

    def _rows(self, known_by: str) -> list[dict[str, Any]]:
        """Return the samples of the row with an id. If the job runs each row with several adapters,
        readers of the job use the id ADAPTER/ID."""
        rows = list(self.reader.find(known_by))
        if rows or runs_of_row(self.reader.manifest) == 1:
            return rows
        adapter, _, row_id = known_by.partition("/")
        return [row for row in self.reader.find(row_id) if row[ADAPTER] == adapter]

    def _add_source(self, trace: Trace, row: Mapping[str, Any]) -> None:
        """Add the rows from which a row was made."""
        if self._dataset.get("kind") != "job":
            runs = runs_of_row(self.reader.manifest)
            index = self._data_index(int(row[ROW_COLUMN]) // runs)
            trace.origins.append(source_place(self._dataset, index))
            return
        source = row.get("source")
        if not isinstance(source, dict) or not {"row_id", SAMPLE_COLUMN} <= source.keys():
            raise ConfigError(f"{self.user_path}: its rows do not say what they were made from")
        for job, row_id in self._upstream(str(source["row_id"])):
            JobTraces(job).add(trace, row_id, source["sample_index"])
            return
        raise self._no_upstream()

    def _no_upstream(self) -> ConfigError:
        return ConfigError(
            f"{self.user_path}: the job whose rows it has read is not there: "
            f"{self._dataset.get('path')} (from {Path.cwd()}, or next to {self.user_path})"
        )

    def _upstream(self, row_id: str) -> Iterator[tuple[str, str]]:
        """Yield (folder, row id) for each upstream job that may have a row. If several jobs are
        read, ids begin with the name of one, which is removed."""
        paths = build(DatasetConfig, dict(self._dataset), "dataset").paths
        folders = jobs_at(paths, self.reader.path)
        for name, folder in folders.items():
            if len(folders) == 1:
                yield folder, row_id
            elif row_id.startswith(f"{name}/"):
                yield folder, row_id.removeprefix(f"{name}/")

    def _data_index(self, row_index: int) -> int:
        """Return the index in the data set of a row of the job; the copies of a row for several
        adapters count as one row."""
        facts = self.reader.row_facts
        if facts is None:
            return row_index
        first = 0
        for number, part in enumerate(facts.parts):
            if row_index < first + part.rows:
                table = self._index_file(f"part-{number:05d}.parquet", [ROW_COLUMN])
                return int(table[ROW_COLUMN][row_index - first].as_py())
            first += part.rows
        return row_index

    def _index_file(self, name: str, columns: Sequence[str]) -> pa.Table:
        path = self.reader.path / ROWS / name
        source = self.reader.storage.parquet(path)
        try:
            return pq.read_table(source, columns=list(columns), memory_map=True)
        except (OSError, pa.ArrowException) as error:
            raise ConfigError(f"{path} cannot be read: {error}") from None

    def _grades(self, row: Mapping[str, Any]) -> Mapping[str, Any]:
        """Return the grades of a sample; empty if it has none."""
        reader = self.reader
        rows_per_shard = int(reader.manifest["identity"]["output"]["rows_per_shard"])
        path = shard_path(reader.path / GRADES, int(row[ROW_COLUMN]) // rows_per_shard)
        if not reader.storage.exists(path):
            return {}
        source = reader.storage.parquet(path)
        keys = read_columns(source, KEYS)
        is_sample = pc.and_(*(pc.equal(keys[name], row[name]) for name in KEYS))
        indices = pc.indices_nonzero(is_sample).to_pylist()
        if not indices:
            return {}
        names = [name for name in _names(reader.storage.parquet(path)) if name not in ROW_KEYS]
        table = read_columns(reader.storage.parquet(path), names)
        return dict(table.slice(indices[0], 1).to_pylist()[0])

    def _add_dropped(self, trace: Trace, row_id: str) -> None:
        """Add why a row was dropped, or why a row from which it would have been made was
        dropped."""
        dropped = self._dropped_by_step(row_id) or self._dropped_by_choice(row_id)
        if dropped is not None:
            trace.origins.append(dropped)
            return
        self._refuse_incomplete(row_id)
        for job, above in self._upstream(_without_sample(row_id)) if self._reads_jobs else ():
            before = Trace()
            JobTraces(job).add(before, above)
            if not before.is_there:
                trace.origins += before.origins
                return
        raise ConfigError(
            f"{self.user_path}: no row has the id {row_id}, and no step has dropped one: "
            f"`batchgen show {self.user_path}` shows ids"
        )

    def _refuse_incomplete(self, row_id: str) -> None:
        """Raise ConfigError for a missing row if the job may still compute it."""
        status = self.reader.metrics.get("status")
        if status not in (None, "complete"):
            raise ConfigError(
                f"{self.user_path}: row {row_id} is not there, and the job is {status}"
            )

    @property
    def _reads_jobs(self) -> bool:
        return self._dataset.get("kind") == "job"

    def _dropped_by_step(self, row_id: str) -> DropReason | None:
        """Return why a step of `rows` dropped a row, or the row from which it was split, according
        to rows/dropped-*.parquet."""
        facts = self.reader.row_facts
        if facts is None:
            return None
        ids = pa.array([*_ancestors(row_id)])
        for number, part in enumerate(facts.parts):
            if not part.dropped:
                continue
            table = self._index_file(f"dropped-{number:05d}.parquet", ["row_id", "step", "reason"])
            for row in table.filter(pc.is_in(table["row_id"], ids)).to_pylist():
                return DropReason(self.user_path, row["row_id"], row["step"], row["reason"])
        return None

    def _dropped_by_choice(self, row_id: str) -> DropReason | None:
        """Return which key of `dataset` left out an answer of an upstream job, and why."""
        if not self._reads_jobs:
            return None
        of_samples = self._dataset.get("rows") in (None, "samples")
        for ancestor in _ancestors(row_id):
            of_row, _, sample = ancestor.rpartition("#") if of_samples else (ancestor, "", "")
            if of_samples and not (of_row and sample.isdecimal()):
                continue
            for job, above in self._upstream(of_row):
                reader = open_job_reader(job)
                rows = [r for r in reader.find(above) if sample in ("", str(r[SAMPLE_COLUMN]))]
                if rows:
                    by, why = self._choice(job, ancestor, rows)
                    return DropReason(self.user_path, ancestor, by, why)
        return None

    def _choice(self, job: str, row_id: str, rows: Sequence[Mapping[str, Any]]) -> tuple[str, str]:
        """Return which key of `dataset` left out all of these answers, and why."""
        without_error = [row for row in rows if row["error"] is None]
        if not without_error and self._dataset.get("errors") in (None, "drop"):
            error = rows[0]["error"]
            return "dataset.errors=drop", f"{error['type']}: {error['message']}"
        where = self._dataset.get("where")
        if where is not None and (why := _why_not(job, where, without_error or rows)) is not None:
            return f"dataset.where={where}", why
        if (limit := self._dataset.get("limit")) is not None:
            return f"dataset.limit={limit}", f"it comes after the first {limit:,} rows"
        if self._dataset.get("rows") == "best":
            return (
                f"dataset.best={self._dataset.get('best')}",
                "another answer of its row is better",
            )
        self._refuse_incomplete(row_id)
        return "dataset", f"{job} has it: it was added after this job had read that one"


def _why_not(job: str, where: str, rows: Sequence[Mapping[str, Any]]) -> str | None:
    """Return the values for which `where` is false for all of these answers; None if it is true for
    one."""
    opened = open_rows(job)
    expression = opened.columns.expression("where", where)
    wanted = opened.columns.read_by(expression) | opened.columns.named([*KEYS])
    keys = {(row[ROW_COLUMN], row[SAMPLE_COLUMN]) for row in rows}
    reasons: list[str] = []
    for row in _rows_of(opened, wanted, keys):
        try:
            if expression.value(row.variables, str(rows[0]["row_id"]), row.variables[ROW_COLUMN]):
                return None
        except ExpressionFailed as error:
            return str(error)
        values = {n: row.variables[n] for n in expression.names if n in row.variables}
        reasons.append(", ".join(f"{name} is {value!r:.60}" for name, value in values.items()))
    return "; ".join(reasons) or None


def _rows_of(rows: FinishedRows, wanted: Any, keys: set[tuple[Any, Any]]) -> Iterator[Any]:
    """Yield the rows with these keys (row index, sample index)."""
    remaining = set(keys)
    for row in rows.rows(wanted):
        key = row.variables[ROW_COLUMN], row.variables[SAMPLE_COLUMN]
        if key in remaining:
            remaining.discard(key)
            yield row
        if not remaining:
            return


def _names(source: Any) -> list[str]:
    from batchgen.storage.shards.checked_file import read_schema

    return list(read_schema(source).names)


def _ancestors(row_id: str) -> Iterator[str]:
    """Yield an id, and the ids of the rows from which steps may have split it: `a#1#2`, `a#1`,
    `a`."""
    while True:
        yield row_id
        above, hash_, number = row_id.rpartition("#")
        if not hash_ or not number.isdecimal():
            return
        row_id = above


def _without_sample(row_id: str) -> str:
    """Return an id without the number of a sample at its end."""
    above, hash_, number = row_id.rpartition("#")
    return above if hash_ and number.isdecimal() else row_id
