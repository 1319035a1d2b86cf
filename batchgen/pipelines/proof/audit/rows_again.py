"""Computes some rows of a job again, exactly as the job computed them, into a temporary folder.
Audits call `compute_again`."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Sequence
from itertools import islice
from pathlib import Path
from typing import Any

import pyarrow as pa

from batchgen.config.groups.job_config import JobConfig
from batchgen.config.groups.workers_config import BudgetConfig
from batchgen.engine.interface.trajectory import GivenAnswer
from batchgen.inputs.dataset.source import Left, ReadJob, Row, Source
from batchgen.inputs.images.row_images import RowImage
from batchgen.inputs.prompts.answer_text import Answer
from batchgen.inputs.prompts.row_prompts import Prompt
from batchgen.jobs.resolve.resolved_job import ResolvedJob
from batchgen.jobs.run.run_job import execute_job
from batchgen.storage.folder.read_job import JobFolderReader
from batchgen.storage.stores.job_storage import Storage
from batchgen.util.errors import ConfigError, JobError


@dataclasses.dataclass(frozen=True, slots=True)
class _RenumberedRow(Row):
    """A row with its number among the sampled ones; `base` is the row with its original number."""

    base: Row = dataclasses.field(kw_only=True)


class SampledRows(Source):
    """Some rows of another source, numbered from 0."""

    num_rows: int | None = None
    fingerprint: str = ""
    jobs: tuple[ReadJob, ...] = ()
    funnel: tuple[Left, ...] = ()

    def __init__(self, source: Source, indices: Sequence[int], storage: Storage | None) -> None:
        """Read the rows. `storage` is the job's storage, which may have a row index.

        Raises:
            ConfigError: the source has no such rows.
        """
        self._source = source
        self.columns, self.features, self.schema = source.columns, source.features, source.schema
        self.jobs, self.funnel = source.jobs, source.funnel
        self.fingerprint = f"{len(indices)} of {source.fingerprint}"
        source.find_index(storage)
        self._rows = [
            _RenumberedRow(number, row.id, row.fields, row.failure, base=row)
            for number, row in enumerate(rows_at(source, indices))
        ]
        self.num_rows = len(self._rows)

    def rows(self, start: int = 0) -> Iterator[Row]:
        """See `Source`."""
        return islice(iter(self._rows), start, None)

    def rows_at(self, indices: Sequence[int]) -> Iterator[Row]:
        """See `Source`."""
        return (self._rows[index] for index in indices)

    def passthrough(self, row: Row) -> dict[str, Any]:
        """See `Source`."""
        return self._source.passthrough(_base_row(row))

    def tables(self, stop: int, size: int) -> Iterator[pa.Table]:
        """The ids of the rows. Other columns are not needed, because the job of this source is
        never compared with another."""
        for start in range(0, stop, size):
            ids = [row.id for row in self._rows[start : min(start + size, stop)]]
            yield pa.table({"row_id": pa.array(ids, pa.string())})


def rows_at(source: Source, indices: Sequence[int]) -> Iterator[Row]:
    """The rows with these indices, in this order; a stream is read from its start.

    Raises:
        ConfigError: there are no such rows.
    """
    last = max(indices)
    if source.num_rows is None:
        wanted = set(indices)
        rows = {r.index: r for r in islice(source.rows(), last + 1) if r.index in wanted}
        if len(rows) < len(wanted):
            raise _no_row(last)
        return (rows[index] for index in indices)
    if last >= source.num_rows:
        raise _no_row(last)
    return source.rows_at(indices)


def _no_row(index: int) -> ConfigError:
    return ConfigError(
        f"dataset: it has no row number {index:,}, which the job has computed: name the data set "
        "that the job has read with dataset.path"
    )


@dataclasses.dataclass(frozen=True)
class _OriginalPrompt(Prompt):
    """Makes the prompts of rows as the job made them: templates see a row's original number."""

    prompt: Prompt

    def token_ids(self, row: Row) -> list[int]:
        return self.prompt.token_ids(_base_row(row))

    def token_ids_and_images(self, row: Row) -> tuple[list[int], list[RowImage]]:
        return self.prompt.token_ids_and_images(_base_row(row))


@dataclasses.dataclass(frozen=True)
class _OriginalAnswer:
    """The answers of rows, for a job that scored answers of its data set."""

    answer: Answer

    def of(self, row: Row) -> GivenAnswer:
        return self.answer.of(_base_row(row))


def _base_row(row: Row) -> Row:
    assert isinstance(row, _RenumberedRow)
    return row.base


def compute_again(
    config: JobConfig,
    parts: ResolvedJob,
    indices: Sequence[int],
    folder: Path,
    storage: Storage | None,
) -> pa.Table:
    """Compute the rows of a job with these indices, all samples of each. Return them with the
    columns of shards, except that `row_index` counts from 0 in the order of `indices`.

    Args:
        folder: an empty folder, which the job fills.
        storage: the job's storage, which may have a row index.

    Raises:
        ConfigError: there are no such rows, or the configuration does not fit them.
        JobError: a signal came, or the rows cannot be written.
    """
    sampled = SampledRows(parts.source, indices, storage)
    audit_parts = dataclasses.replace(
        parts,
        source=sampled,
        prompt=_OriginalPrompt(parts.prompt),
        answer=None if parts.answer is None else _OriginalAnswer(parts.answer),
    )
    output = dataclasses.replace(
        config.output, dir=str(folder), report=False, retry_errors=False, on_all_errors="continue"
    )
    output = dataclasses.replace(output, reuse=None)  # copied rows would prove nothing
    again = dataclasses.replace(config, output=output, launcher=None, budget=BudgetConfig())
    result = execute_job(again, audit_parts)
    if result.stopped_by is not None:
        raise JobError("stopped before the rows were computed")
    reader = JobFolderReader(folder)
    return pa.Table.from_batches(list(reader.batches()), schema=reader.schema)
