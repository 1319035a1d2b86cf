"""What the verbs `show` and `export` share: opening a job's folder, and errors as exit codes."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable
from pathlib import Path

from batchgen.cli.job_outcome import refusal
from batchgen.config.workers_config import WorkersConfig
from batchgen.folder.read_job import JobFolderReader
from batchgen.storage.open_storage import open_storage
from batchgen.util.errors import ConfigError, JobError
from batchgen.util.paths import folder_here, is_url, user_folder, user_path


def open_job(given: str) -> JobFolderReader:
    """The reader of a job's folder.

    Raises:
        ConfigError: the folder is not one of a job. The message names the jobs that lie in it.
    """
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
    """The same for a verb that works on folders of this machine alone.

    Raises:
        ConfigError: as of `open_job`, or the job is in an object store.
    """
    return open_job(folder_here(given, f"batchgen {verb}"))


def column_list(text: str) -> list[str]:
    """The names in `a,b`."""
    return [name.strip() for name in text.split(",") if name.strip()]


def exit_code(work: Callable[[], int]) -> int:
    """Do the work of a verb and return its exit code; mistakes and errors are printed.

    A reader that wants no more (`batchgen show OUT | head`) and Ctrl-C end it without a word.
    """
    try:
        code = work()
        sys.stdout.flush()
    except (ConfigError, JobError) as error:
        return refusal(error)
    except BrokenPipeError:
        # What is left in the buffer would raise once more when Python closes the stream.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 0
    except KeyboardInterrupt:
        return 130
    return code
