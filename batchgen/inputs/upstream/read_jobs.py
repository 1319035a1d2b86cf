"""Finds the jobs that `dataset.path` names with `dataset=job`: `read_jobs` for complete jobs,
`follow_job` for one that may run."""

from __future__ import annotations

import glob
import sys
import time
from collections.abc import Mapping, Sequence
from pathlib import Path

from batchgen.inputs.upstream.followed_job import FollowedJob, Promise
from batchgen.inputs.upstream.other_job import OtherJob
from batchgen.storage.folder.open_folder import open_job_reader, refuse_incomplete
from batchgen.storage.folder.pipeline_record import step_of
from batchgen.storage.folder.read_job import JobFolderReader
from batchgen.storage.folder.step_folders import find_record, step_folder
from batchgen.util.errors import ConfigError
from batchgen.util.paths import is_url, user_folder

_KEY = "dataset.path"
_WAIT_SECONDS = 0.5
"""The time between two looks for the first shard of a job."""


def read_jobs(paths: Sequence[str], reader_folder: str | None) -> list[OtherJob]:
    """Return the jobs at some paths, globs and URLs, in their order.

    The name of each job is the end of its path, with as many folders as are needed to distinguish
    the jobs.

    Args:
        reader_folder: the folder of the reading job, which cannot be one of the jobs; None if it
            has none.

    Raises:
        ConfigError: a folder is no complete job, or is the reader's own.
        JobError: a file of a job is damaged.
    """
    folders = list(dict.fromkeys(folder for path in paths for folder in _folders(path)))
    for folder in folders:
        if reader_folder is not None and _is_same(folder, reader_folder):
            raise ConfigError(_own_folder(folder))
    names = _names(folders)
    readers = map(_complete_job, folders)
    return [OtherJob(reader, name) for reader, name in zip(readers, names, strict=True)]


def follow_job(
    path: str, reader_folder: str | None, promised: Mapping[str, Promise], wait: bool
) -> FollowedJob:
    """Return the job at a path, which may still run.

    Args:
        reader_folder: the folder of the reading job; None if it has none.
        promised: for jobs that may not have begun, such as earlier steps of a pipeline, what is
            already known of their rows; by their folders.
        wait: whether to wait for the first shard of a job that is not in `promised`.

    Raises:
        ConfigError: the folder is no job or is the reader's own, or its first shard is not
            finished.
        JobError: a file of the job is damaged.
    """
    path_given = user_folder(path, _KEY)
    folder = path_given if path in promised else step_folder(path_given)
    if reader_folder is not None and _is_same(folder, reader_folder):
        raise ConfigError(_own_folder(folder))
    (name,) = _names([folder])
    if (promise := promised.get(path)) is not None:
        return FollowedJob(Path(folder), name, promise)
    reader, is_reported = _opened(folder), False
    while (promise := Promise.of_folder(reader)) is None:
        if not wait:
            raise ConfigError(
                f"{_KEY}: no shard of {folder} is finished, so its columns are not known yet: try "
                "again when one is"
            )
        if not is_reported:
            print(f"batchgen: waiting for the first shard of {folder} …", file=sys.stderr)
        is_reported = True
        time.sleep(_WAIT_SECONDS)
    return FollowedJob(Path(folder), name, promise)


def _own_folder(folder: str) -> str:
    return f"{_KEY}: {folder} is the job's own output.dir: write into another folder"


def _folders(path: str) -> list[str]:
    """Return the folders that a path means: itself, or the matches of a glob."""
    if is_url(path):
        if glob.has_magic(path):
            raise ConfigError(
                f"{_KEY}: {path}: globs are for folders of this machine: write the jobs of an "
                f"object store as a list ({_KEY}=[s3://BUCKET/a,s3://BUCKET/b])"
            )
        return [step_folder(user_folder(path, _KEY))]
    folder = step_folder(user_folder(path, _KEY))
    if not glob.has_magic(folder) or Path(folder).is_dir():
        return [folder]
    folders = sorted(name for name in glob.glob(folder) if Path(name).is_dir())
    if not folders:
        raise ConfigError(f"{_KEY}: no folder matches {path} (from {Path.cwd()})")
    return folders


def _complete_job(folder: str) -> JobFolderReader:
    """Open a job. Raises ConfigError if it is not complete."""
    reader = _opened(folder)
    refuse_incomplete(reader, folder)
    return reader


def _opened(folder: str) -> JobFolderReader:
    """Open a job. Raises ConfigError if the folder has none."""
    try:
        return open_job_reader(folder)
    except ConfigError as error:
        raise ConfigError(
            f"{_KEY}: {error} (dataset=job reads the folders of jobs, dataset=files reads files)"
        ) from None


def _is_same(folder: str, reader_folder: str) -> bool:
    if is_url(folder) or is_url(reader_folder):
        return folder == reader_folder
    return Path(folder).resolve() == Path(reader_folder).resolve()


def _names(folders: Sequence[str]) -> list[str]:
    """Return the shortest ends of the paths that differ from each other, all with the same number
    of folders."""
    parts = [_parts(folder) for folder in folders]
    for length in range(1, max(map(len, parts)) + 1):
        names = ["/".join(part[-length:]) for part in parts]
        if len(set(names)) == len(names):
            return names
    raise ConfigError(f"{_KEY}: {folders[0]} and another path are one folder: name it once")


def _parts(folder: str) -> list[str]:
    """Return the folder names of a path. The folder of a pipeline step is replaced by the step's
    name, so that the ids of its rows do not change with its version."""
    names = (
        folder.partition("://")[2].split("/") if is_url(folder) else Path(folder).resolve().parts
    )
    step = step_of(names[-1])
    if step is not None and find_record(folder.rpartition("/")[0] or ".") is not None:
        return [*names[:-1], step]
    return [*names]
