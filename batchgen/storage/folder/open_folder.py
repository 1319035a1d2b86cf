"""Opens a job's folder for reading. All verbs that read a job call these functions."""

from __future__ import annotations

from pathlib import Path

from batchgen.config.groups.workers_config import WorkersConfig
from batchgen.storage.folder.job_summary import status_line
from batchgen.storage.folder.read_job import JobFolderReader
from batchgen.storage.folder.step_folders import find_record, step_folder
from batchgen.storage.stores.open_storage import open_storage
from batchgen.util.errors import ConfigError
from batchgen.util.paths import folder_here, is_url, user_folder, user_path


def open_job_reader(user_path: str) -> JobFolderReader:
    """Open a job's folder for reading. OUT/STEP names the folder of a pipeline's step.

    Raises:
        ConfigError: the folder is not a job's; the message names the jobs below it.
        JobError: metrics.json says that the job is complete, but rows are missing; or a file is
            damaged.
    """
    if is_url(user_path):
        storage = open_storage(step_folder(user_folder(user_path, "OUT")), WorkersConfig())
        reader = JobFolderReader(storage.path, storage)
    else:
        reader = _open_here(user_path)
    reader.check()
    return reader


def _open_here(job_path: str) -> JobFolderReader:
    """Open a folder on this machine."""
    path = Path(step_folder(str(user_path(job_path, "OUT"))))
    try:
        return JobFolderReader(path)
    except ConfigError as error:
        if (record := find_record(str(path))) is not None:
            names = ", ".join(f"{job_path.rstrip('/')}/{name}" for name in record.current)
            raise ConfigError(f"{job_path} is a pipeline's folder: name a step: {names}") from None
        jobs = sorted(path.glob("*/manifest.json")) if path.is_dir() else []
        if not jobs:
            raise
        names = ", ".join(str(Path(job_path, job.parent.name)) for job in jobs[:5])
        more = ", …" if len(jobs) > 5 else ""
        raise ConfigError(f"{error}; there are jobs in {names}{more}") from None


def open_folder(user_path: str, verb: str) -> JobFolderReader:
    """Open a job's folder for a verb that reads only folders on this machine."""
    return open_job_reader(folder_here(user_path, f"batchgen {verb}"))


def refuse_incomplete(reader: JobFolderReader, user_path: str) -> None:
    """Check that a job is complete.

    Raises:
        ConfigError: it is not; the message has the command that completes it.
    """
    status = reader.metrics.get("status")
    if status == "complete":
        return
    remedy = (
        f"complete it first: batchgen {user_path.rstrip('/')}/config.yaml output.dir={user_path}"
    )
    if status == "running":
        remedy = f"wait until it is complete (batchgen status {user_path})"
    elif not reader.storage.in_place:
        remedy = "run its command again, which completes it"
    raise ConfigError(f"the job is not complete ({status_line(reader, user_path)}): {remedy}")
