"""What the verbs `show` and `export` share: opening a job's folder, and errors as exit codes."""

from __future__ import annotations

from pathlib import Path

from batchgen.config.workers_config import WorkersConfig
from batchgen.folder.read_job import JobFolderReader
from batchgen.storage.open_storage import open_storage
from batchgen.util.errors import ConfigError
from batchgen.util.paths import folder_here, is_url, user_folder, user_path


def open_job(given: str) -> JobFolderReader:
    """The reader of a job's folder, or a ConfigError that names the jobs below it."""
    if is_url(given):
        storage = open_storage(user_folder(given, "OUT"), WorkersConfig())
        return JobFolderReader(storage.path, storage)
    path = user_path(given, "OUT")
    try:
        return JobFolderReader(path)
    except ConfigError as error:
        jobs = sorted(path.glob("*/manifest.json")) if path.is_dir() else []
        if not jobs:
            raise
        names = ", ".join(str(Path(given, job.parent.name)) for job in jobs[:5])
        more = ", …" if len(jobs) > 5 else ""
        raise ConfigError(f"{error}; there are jobs in {names}{more}") from None


def open_folder(given: str, verb: str) -> JobFolderReader:
    """The reader of a job's folder for a verb that works on this machine alone."""
    return open_job(folder_here(given, f"batchgen {verb}"))
