"""Finds the jobs that `dataset.path` names with `dataset=job`."""

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


def read_jobs(paths: Sequence[str], reader_folder: str | None) -> list[OtherJob]:
    """The jobs at some paths, globs and URLs, in their order; `reader_folder` is where the
    reader writes, if that could be one of them.

    Each is called by the last names of its path, as many as tell it from the others.

    Raises:
        ConfigError: one of them is no complete job, or is the reader's own folder.
        JobError: a file of one is damaged.
    """
    folders = list(dict.fromkeys(folder for path in paths for folder in _folders(path)))
    for folder in folders:
        if reader_folder is not None and _is_same(folder, reader_folder):
            raise ConfigError(_own_folder(folder))
    names = _names(folders)
    return [OtherJob(_reader(folder), name) for folder, name in zip(folders, names, strict=True)]


def follow_job(
    path: str, reader_folder: str | None, promised: Mapping[str, Promise], wait: bool
) -> FollowedJob:
    """The job at a path, which may run.

    Args:
        promised: what is known of jobs that may not have begun, by their folders.
        wait: whether to wait for the first shard of a job of which nothing is known.

    Raises:
        ConfigError: it is no job, is the reader's own, or its first shard is not finished.
        JobError: a file of it is damaged.
    """
    path_given = user_folder(path, _KEY)
    folder = path_given if path in promised else step_folder(path_given)
    if reader_folder is not None and _is_same(folder, reader_folder):
        raise ConfigError(_own_folder(folder))
    (name,) = _names([folder])
    if (promise := promised.get(path)) is not None:
        return FollowedJob(Path(folder), name, promise)
    reader, is_told = _opened(folder), False
    while (promise := Promise.found(reader)) is None:
        if not wait:
            raise ConfigError(
                f"{_KEY}: no shard of {folder} is finished, so its columns are not known yet: try "
                "again when one is"
            )
        if not is_told:
            print(f"batchgen: waiting for the first shard of {folder} …", file=sys.stderr)
        is_told = True
        time.sleep(_WAIT_SECONDS)
    return FollowedJob(Path(folder), name, promise)


def _own_folder(folder: str) -> str:
    return f"{_KEY}: {folder} is the job's own output.dir: write into another folder"


def _folders(path: str) -> list[str]:
    """The folders that a path means: itself, or what a glob finds."""
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


def _reader(folder: str) -> JobFolderReader:
    reader = _opened(folder)
    refuse_incomplete(reader, folder)
    return reader


def _opened(folder: str) -> JobFolderReader:
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
    """The shortest ends of the paths that differ: as many names of folders for each."""
    parts = [_parts(folder) for folder in folders]
    for length in range(1, max(map(len, parts)) + 1):
        names = ["/".join(part[-length:]) for part in parts]
        if len(set(names)) == len(names):
            return names
    raise ConfigError(f"{_KEY}: {folders[0]} and another path are one folder: name it once")


def _parts(folder: str) -> list[str]:
    """The names on the way to a folder. A step of a pipeline goes by its own name, so that the ids
    of its rows stay when its version changes."""
    names = (
        folder.partition("://")[2].split("/") if is_url(folder) else Path(folder).resolve().parts
    )
    step = step_of(names[-1])
    if step is not None and find_record(folder.rpartition("/")[0] or ".") is not None:
        return [*names[:-1], step]
    return [*names]
