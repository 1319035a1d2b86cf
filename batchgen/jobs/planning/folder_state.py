"""Finds out for a plan or a dry run whether the job would start, resume or be refused in its output
folder."""

from __future__ import annotations

from contextlib import closing
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING, NamedTuple

import pyarrow as pa
import pyarrow.compute as pc

from batchgen.config.groups.job_config import JobConfig
from batchgen.inputs.dataset.row_digest import rows_digest
from batchgen.jobs.run.changed_row import changed_row
from batchgen.jobs.run.checked_rows import job_manifest, max_rows, output_schema
from batchgen.jobs.run.image_files import content_of
from batchgen.storage.folder.read_job import JobFolderReader
from batchgen.storage.folder.refused_folder import (
    has_rows,
    refuse_folder,
    refuse_other_job,
    refuse_shrinking,
    written_manifest,
)
from batchgen.storage.shards.enough import OUTCOME
from batchgen.storage.shards.row_order import KEYS, SAMPLE_COLUMN
from batchgen.storage.stores.job_storage import Storage
from batchgen.storage.stores.manifest import READ_JOB, Manifest
from batchgen.storage.stores.open_storage import open_storage
from batchgen.util.errors import ConfigError, JobError

if TYPE_CHECKING:
    from batchgen.inputs.dataset.source import Source
    from batchgen.jobs.resolve.opened_job import OpenedJob


class FolderState(NamedTuple):
    """What a job would do with its folder.

    Attributes:
        text: the same in words.
        done: the answers in the folder that stay.
        complete: rows that have all their samples; counted only with `sampling.until`.
        samples: the samples of these rows.
    """

    text: str
    done: int = 0
    complete: int = 0
    samples: int = 0


def folder_state(config: JobConfig, opened: OpenedJob) -> FolderState:
    """Find out what the job would do with its folder.

    The files of the model are not read, so a changed model is not noticed here.

    Raises:
        ConfigError: the job would be refused because of what the folder holds.
    """
    with closing(open_storage(config.output.dir, config.workers)) as storage:
        return _state(config, opened, storage)


def find_rows(config: JobConfig, source: Source) -> None:
    """Find out which rows the row steps choose: from the job's folder if it holds the row index,
    otherwise by running the steps."""
    if source.data is source:
        return
    try:
        storage = open_storage(config.output.dir, config.workers)
    except (ConfigError, JobError):  # `folder_state` reports what is wrong with the folder
        source.find_index(None)
        return
    with closing(storage):
        source.find_index(storage)


def _state(config: JobConfig, opened: OpenedJob, storage: Storage) -> FolderState:
    path = storage.display_name
    refuse_folder(storage)
    try:
        storage.names(storage.path)
    except FileNotFoundError:
        return FolderState(f"{path}: a new folder")
    old = written_manifest(storage)
    if old is None or not has_rows(storage):
        return FolderState(f"{path}: no answers yet")
    manifest, source = _manifest(config, opened, old), opened.source
    digests = partial(rows_digest, content_of(source, opened.prompt))
    name_changed_row = partial(changed_row, storage, source)
    if refuse_other_job(
        storage, old, manifest, digests, name_changed_row, overwrite=config.output.overwrite
    ):
        what = "the output of a different job, which is deleted (output.overwrite)"
        return FolderState(f"{path}: {what}")
    refuse_shrinking(storage, max_rows(config, source.num_rows))
    errors = rows = complete = samples = 0
    until = config.sampling.until
    columns = ["finish_reason"] + ([] if until is None else [OUTCOME, *KEYS])
    for batch in JobFolderReader(storage.path, storage).batches(columns):
        rows += batch.num_rows
        errors += batch["finish_reason"].to_pylist().count("error")
        if until is not None:
            # All samples of a complete row have an outcome; the row is counted by its first sample.
            known = pc.is_in(batch[OUTCOME], pa.array(["enough", "exhausted"]))
            samples += pc.sum(known).as_py() or 0
            complete += pc.sum(pc.and_(known, pc.equal(batch[SAMPLE_COLUMN], 0))).as_py() or 0
    text = f"{path}: resumes, {rows:,}"
    if source.num_rows is not None and until is None:
        text += f" of {source.num_rows * config.sampling.n:,}"
    text += " answers are there"
    if errors:
        what = "are computed again" if config.output.retry_errors else "stay as they are"
        text += f", {errors:,} of them errors, which {what}"
    done = rows - errors * config.output.retry_errors
    return FolderState("\n".join([text, *old.grown(manifest)]), done, complete, samples)


def _manifest(config: JobConfig, opened: OpenedJob, old: Manifest) -> Manifest:
    """The manifest of the job, taking its models to be those that the folder was made with."""
    models = {
        name: text
        for name, text in old.fingerprints.items()
        if name != "dataset" and not name.startswith(READ_JOB)
    }
    parts = replace(opened, fingerprints=models)
    return job_manifest(config, parts, output_schema(config, parts))
