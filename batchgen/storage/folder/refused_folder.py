"""Checks whether a folder can be the output folder of a job, or of this job.

`JobFolder` calls these functions before it writes anything.
"""

from __future__ import annotations

import errno
import os
import shutil

from batchgen.storage.folder.read_job import JobFolderReader
from batchgen.storage.leases.job_files import LOCK, LOCKS, LOGS, MANIFEST, refuse_links
from batchgen.storage.leases.lease_files import DATA, JOURNAL
from batchgen.storage.shards.journal import journal_files
from batchgen.storage.shards.shard_files import shard_files
from batchgen.storage.stores.folder_storage import names_in
from batchgen.storage.stores.job_storage import Storage
from batchgen.storage.stores.manifest import ChangedRow, DifferentJob, Manifest, RowDigests
from batchgen.util.errors import ConfigError, JobError
from batchgen.util.temporary import is_temporary_of

MIN_FREE_BYTES = 32 * 2**20  # on the disk of a new job


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
    """Check that a job can write in a folder. Nothing is changed.

    Raises:
        ConfigError: the folder has foreign files, cannot be written or has too little space.
    """
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
    existing = next(
        path for path in (storage.path, *storage.path.absolute().parents) if path.exists()
    )
    if not os.access(existing, os.W_OK | os.X_OK):
        raise unusable(storage, PermissionError(errno.EACCES, os.strerror(errno.EACCES)))
    usage = shutil.disk_usage(existing)
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
    """Check that a folder does not have rows of another job, unless `overwrite` allows to delete
    them.

    Returns:
        Lines that say how the folder's job differs; none if it is the same job.

    Raises:
        DifferentJob: the folder has rows of another job.
    """
    differences = stored.differences(requested, digests, changed_row)
    if differences and not overwrite and has_rows(storage):
        raise DifferentJob(storage.display_name, differences)
    return differences


def finished_rows(storage: Storage) -> int:
    """One more than the `row_index` of the last finished row."""
    return JobFolderReader(storage.path, storage).end


def refuse_shrinking(storage: Storage, most_rows: int | None) -> None:
    """Check that the data set does not end before a finished row. It has at most `most_rows` rows;
    None if that is not known.

    Raises:
        ConfigError: the data set is shorter.
    """
    if most_rows is None:
        return
    if (end := finished_rows(storage)) > most_rows:
        raise ConfigError(
            f"dataset.limit: the job would have {most_rows:,} rows, but in {storage.display_name} "
            f"rows up to number {end:,} are finished, and a job can grow but not shrink: use "
            f"dataset.limit={end} or more, or another output.dir"
        )


def refuse_foreign_files(storage: Storage) -> None:
    """Check that all files of a folder can be batchgen's.

    Raises:
        ConfigError: the folder has files but no manifest, or has links, which batchgen never makes.
    """
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
