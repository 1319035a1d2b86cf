"""Reasons for which a folder cannot be the output folder of a job, or not of this one.

`JobFolder` asks these functions before it writes anything.
"""

from __future__ import annotations

import errno
import os
import shutil

from batchgen.storage.folder.read_job import JobFolderReader
from batchgen.storage.leases.lease_files import DATA, JOURNAL
from batchgen.storage.leases.own_files import LOCK, LOCKS, LOGS, MANIFEST, refuse_links
from batchgen.storage.shards.journal import journal_files
from batchgen.storage.shards.shard_files import shard_files
from batchgen.storage.stores.folder_storage import names_in
from batchgen.storage.stores.job_storage import Storage
from batchgen.storage.stores.manifest import ChangedRow, DifferentJob, Manifest, RowDigests
from batchgen.util.errors import ConfigError, JobError
from batchgen.util.temporary import is_temporary_of

MIN_FREE_BYTES = 32 * 2**20


def unusable(storage: Storage, error: OSError | JobError) -> ConfigError:
    """The error for an output folder that cannot be written."""
    why = error.strerror if isinstance(error, OSError) else error
    return ConfigError(
        f"output.dir={storage.display_name} cannot be written ({why}): choose a folder that "
        "you may write to, with free space"
    )


def has_rows(storage: Storage) -> bool:
    """Whether the folder's job may have a finished row."""
    data, journal = storage.path / DATA, storage.path / JOURNAL
    return bool(
        shard_files(data, names_in(storage, DATA))
        or journal_files(journal, names_in(storage, JOURNAL))
    )


def written_manifest(storage: Storage) -> Manifest | None:
    """The manifest in a folder; None if there is none."""
    content = storage.read(storage.path / MANIFEST)
    return (
        None if content is None else Manifest.parse(content, f"{storage.display_name}/{MANIFEST}")
    )


def refuse_folder(storage: Storage) -> None:
    """Raise ConfigError for a folder in which no job at all can write. Nothing is changed."""
    is_new = True
    try:
        refuse_foreign_files(storage)
        is_new = not storage.exists(storage.path / MANIFEST)
    except FileNotFoundError:
        pass
    except OSError as error:
        raise unusable(storage, error) from None
    if not storage.in_place:
        return
    there = next(path for path in (storage.path, *storage.path.absolute().parents) if path.exists())
    if not os.access(there, os.W_OK | os.X_OK):
        raise unusable(storage, PermissionError(errno.EACCES, os.strerror(errno.EACCES)))
    usage = shutil.disk_usage(there)
    if not usage.total:
        raise unusable(storage, JobError("it is not on a disk"))
    if is_new and usage.free < MIN_FREE_BYTES:
        raise ConfigError(
            f"output.dir={storage.display_name} has {usage.free >> 20} MiB of free disk space, "
            "which is too little for any job: free some, or choose another output.dir"
        )


def refuse_other_job(
    storage: Storage,
    stored: Manifest,
    requested: Manifest,
    digests: RowDigests,
    changed_row: ChangedRow,
    *,
    overwrite: bool,
) -> list[str]:
    """Raise DifferentJob for a folder with rows of another job, unless `overwrite` allows to delete
    it.

    Returns:
        Lines that say how the folder's job differs; none if it is the same job.
    """
    differences = stored.differences(requested, digests, changed_row)
    if differences and not overwrite and has_rows(storage):
        raise DifferentJob(storage.display_name, differences)
    return differences


def finished_rows(storage: Storage) -> int:
    """The number of rows up to the last finished one."""
    return JobFolderReader(storage.path, storage).end


def refuse_shrinking(storage: Storage, most_rows: int | None) -> None:
    """Raise ConfigError for a data set that ends before a finished row. It has at most `most_rows`
    rows; None if that is not known."""
    if most_rows is None:
        return
    if (end := finished_rows(storage)) > most_rows:
        raise ConfigError(
            f"dataset.limit: the job would have {most_rows:,} rows, but in {storage.display_name} "
            f"rows up to number {end:,} are finished, and a job can grow but not shrink: use "
            f"dataset.limit={end} or more, or another output.dir"
        )


def refuse_foreign_files(storage: Storage) -> None:
    """Raise ConfigError for a folder that has files but no manifest, or that has links: batchgen
    writes neither."""
    names = set(storage.names(storage.path))
    if storage.in_place:
        refuse_links(storage.path)
    known_names = {LOCK, LOCKS, LOGS}
    foreign = sorted(n for n in names - known_names if not is_temporary_of(n, MANIFEST))
    if foreign and MANIFEST not in names:
        listed = ", ".join(foreign[:3]) + (" …" if len(foreign) > 3 else "")
        raise ConfigError(
            f"output.dir={storage.display_name} holds files that do not belong to a batchgen job "
            f"({listed}): choose a new or empty folder; batchgen does not delete them, whatever "
            "output.overwrite says"
        )
