"""Opens a job's folder for this process: the locked folder, this worker, and the writer of its
rows. `run_job.py` calls these functions in this order.

The first process that opens the folder has it for itself (`JobFolder.exclusive`) until it knows
which rows are missing. Then it shares the folder, and other processes may join it as workers.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial

from batchgen.config.groups.job_config import JobConfig
from batchgen.inputs.dataset.row_digest import rows_digest
from batchgen.jobs.generation.worker import How, Worker, others_run
from batchgen.jobs.resolve.resolved_job import ResolvedJob
from batchgen.jobs.run.changed_row import changed_row
from batchgen.jobs.run.checked_rows import job_manifest, max_rows
from batchgen.jobs.run.image_files import content_of
from batchgen.jobs.run.job_end import completed_elsewhere
from batchgen.storage.folder.job_folder import JobFolder
from batchgen.storage.folder.refused_folder import finished_rows, refuse_shrinking
from batchgen.storage.leases.file_store import FolderGone
from batchgen.storage.shards.checked_file import DamagedFile
from batchgen.storage.shards.output_schema import OutputSchema
from batchgen.storage.shards.output_writer import OutputWriter
from batchgen.storage.stores.open_storage import open_storage
from batchgen.util.errors import FolderLost, JobError
from batchgen.util.signals import JobStopped

_OPENING_SECONDS, _INDEX_SECONDS = 60.0, 86400.0
"""The seconds that a worker waits for the worker that opens the folder, or `workers.stale_after` if
that is longer. The second number is for jobs with row steps, which must first go through the whole
data set."""


def open_job_folder(config: JobConfig, parts: ResolvedJob, schema: OutputSchema) -> JobFolder:
    """Lock the job's folder, and make sure that it holds this job or can become its folder.

    Raises:
        ConfigError: the folder holds another job, or rows that have changed in the data set.
    """
    storage, source = open_storage(config.output.dir, config.workers), parts.source
    # A source with row steps has another source, the data set, below it.
    data, has_row_steps = source.data, source.data is not source
    data.learn()  # which rows have arrived, if another job still writes the data set
    lacks_rows = data.follows and data.num_rows is None
    folder = JobFolder(
        storage.path,
        job_manifest(config, parts, schema),
        lambda stop: rows_digest(content_of(source, parts.prompt), stop),
        # The rows that row steps choose are not known before the folder is open.
        changed_row=_no_row if has_row_steps else partial(changed_row, storage, source),
        overwrite=config.output.overwrite,
        wait=max(_INDEX_SECONDS if has_row_steps else _OPENING_SECONDS, config.workers.stale_after),
        exclusive=lambda path: not others_run(path, config.workers),
        storage=storage,
        follows=data.follows,
        lacks_rows=lacks_rows,
    )
    try:
        rows_of_job = partial(finished_rows, storage)
        source.open_index(storage, alone=folder.exclusive, finished=rows_of_job)
        if folder.exclusive and not lacks_rows:
            refuse_shrinking(storage, max_rows(config, source.num_rows))
    except BaseException:
        folder.close()
        raise
    return folder


def _no_row(first: int, last: int) -> None:
    """Find no changed row: used instead of `changed_row` where row steps choose the rows."""


@contextmanager
def worker_in(config: JobConfig, folder: JobFolder) -> Iterator[Worker]:
    """Register this process as a worker of the folder within the context. At its end, record how
    the worker ended, for the other workers; nothing is recorded in a folder that is lost."""
    joins, storage = not folder.exclusive, folder.storage
    worker = Worker(folder.path, config.workers, folder.least_worker, storage, joins=joins)
    how: How | None = "failed"
    try:
        folder.confirm()
        yield worker
        how = "complete"
    except JobStopped:
        how = "stopped"
        raise
    except FolderLost:
        how = None
        raise
    except (JobError, OSError) as error:
        # A full or missing disk ends every worker, so it must not count against the shard.
        how = "failed" if isinstance(error, DamagedFile) else "stopped"
        raise
    finally:
        worker.end(how)


def writer_in(
    config: JobConfig, parts: ResolvedJob, folder: JobFolder, schema: OutputSchema, worker: Worker
) -> OutputWriter:
    """Make the writer of this worker's rows.

    Raises:
        FolderGone: the other workers have completed the job meanwhile.
    """
    source = parts.source
    try:
        return OutputWriter(
            folder.data,
            folder.journal,
            schema,
            config.output.rows_per_shard,
            config.sampling.most_samples,
            num_rows=source.num_rows,
            retry_errors=config.output.retry_errors,
            worker=worker.number,
            older=None if folder.exclusive else worker.older(),
            publish=worker.publish,
            storage=folder.storage,
        )
    except FileNotFoundError as error:
        if folder.exclusive:
            raise
        raise FolderGone(str(error.filename)) from None
    except FolderGone:
        # In an object store, which has no folders, this worker's heartbeat was written among the
        # files that the completed job had deleted: delete them again.
        if completed_elsewhere(folder.storage, parts, rows=0) is not None:
            folder.remove_journal()
        raise
