"""The names of the files and folders that a job writes in its folder, and a check that none is a
link."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator
from pathlib import Path

from batchgen.storage.leases.lease_files import DATA, JOURNAL, LEASES, WORKERS
from batchgen.storage.leases.patience import patiently
from batchgen.util.errors import ConfigError

LOCK = ".lock"
LOCKS = ".locks"
"""The locks in an object store. They are not named `.lock`, so that a downloaded copy is an
ordinary folder."""
LOGS = "logs"
"""The output of workers that launchers start on other machines."""
MANIFEST = "manifest.json"
ROWS = "rows"
"""The row index: the rows of the data set that each row of the job comes from, if there are row
steps."""
ROW_INDEX = "rows.json"
KEYS = "keys"
"""The keys of rows, by which later jobs find rows to copy (`output.reuse`)."""
THUMBNAILS = "thumbnails"
"""Small pictures of the images of rows."""
OF_WORKERS = (LEASES, WORKERS)
"""The folders through which workers coordinate while a job runs."""
JOB_FILES = (
    *(DATA, JOURNAL, "cost", "differing", "grades", *OF_WORKERS, "report.html", ROW_INDEX, ROWS),
    *(KEYS, THUMBNAILS, "README.md", "config.yaml", "metrics.json", MANIFEST),
)
"""Everything that a job writes, in the order in which it is deleted. The manifest is last, so that
a folder whose deletion was interrupted still shows which job it belongs to."""


def refuse_links(folder: Path) -> None:
    """Check that none of a job's files and folders is a link or a pipe.

    A stranger who made the folder could lead such a link to any file of the user's, which would
    then be shown, put into the report, or overwritten. The path of the folder itself may have
    links. Logs may be links to other logs: submitit links to the script that it has submitted.

    Raises:
        ConfigError: there is a link or a pipe.
    """
    names = {LOCK, LOCKS, LOGS, *JOB_FILES}
    logs = os.path.join(os.path.realpath(folder), LOGS, "")
    for entry in _odd([entry for entry in _entries(folder) if entry.name in names]):
        if Path(entry.path).relative_to(folder).parts[0] == LOGS and entry.is_file():
            if os.path.realpath(entry.path).startswith(logs):
                continue
        what = "a link" if entry.is_symlink() else "neither a file nor a folder"
        raise ConfigError(
            f"{folder}: {os.path.relpath(entry.path, folder)} is {what}, which a job's folder "
            "may not have: it may lead to anything on this machine. If you know where it leads, "
            "replace it by what is there (`cp -rL` copies a folder without its links)"
        )


def _entries(folder: str | os.PathLike[str]) -> list[os.DirEntry[str]]:
    return patiently(lambda: list(os.scandir(folder)))


def _odd(entries: list[os.DirEntry[str]]) -> Iterator[os.DirEntry[str]]:
    """Yield the entries that are neither a file nor a folder, among some entries of a folder and
    everything below them."""
    for entry in entries:
        if entry.is_dir(follow_symlinks=False):
            # A running job may delete its journals meanwhile. A folder that cannot be read is safe.
            with contextlib.suppress(FileNotFoundError, PermissionError):
                yield from _odd(_entries(entry.path))
        elif not entry.is_file(follow_symlinks=False):
            if os.path.lexists(entry.path):  # otherwise it was just deleted
                yield entry
