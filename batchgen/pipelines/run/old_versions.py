"""Finds and deletes the folders of earlier versions of a pipeline's steps, for `batchgen clean`."""

from __future__ import annotations

from contextlib import AbstractContextManager, closing, nullcontext, suppress
from dataclasses import dataclass, replace

from batchgen.config.groups.workers_config import WorkersConfig
from batchgen.storage.folder.pipeline_record import RECORD, PipelineRecord, step_folder_name
from batchgen.storage.folder.read_job import JobFolderReader
from batchgen.storage.folder.step_folders import locked_record, read_record
from batchgen.storage.leases.folder_lock import FolderLock
from batchgen.storage.leases.job_files import JOB_FILES, LOCK, LOCKS, LOGS, MANIFEST
from batchgen.storage.stores.job_storage import Storage
from batchgen.storage.stores.open_storage import open_storage
from batchgen.util.errors import ConfigError


@dataclass(frozen=True)
class OldVersion:
    """A version of a step that is not the current one.

    Attributes:
        address: the version's address, see open_pipeline.py.
        folder: its folder, a path or URL.
        size: the bytes in the folder.
        needed: why the version must stay; None if it may be deleted.
    """

    step: str
    address: str
    folder: str
    size: int
    needed: str | None


class OldVersions:
    """The old versions of a pipeline's steps.

    Args:
        out: the folder of the pipeline, a path or URL.
    """

    def __init__(self, out: str) -> None:
        """Read pipeline.json. Raises ConfigError if the folder has none."""
        self._out = out.rstrip("/")
        with closing(open_storage(self._out, WorkersConfig())) as storage:
            record = read_record(storage)
        if record is None:
            raise ConfigError(f"{out} is not the folder of a pipeline: it has no {RECORD}")
        self._record: PipelineRecord = record

    def found(self) -> list[OldVersion]:
        """Return the old versions whose folders exist; of each step, the oldest first."""
        versions = []
        for step, known in self._record.steps.items():
            for address in known.older[::-1]:
                folder = self._folder(step, address)
                with closing(open_storage(folder, WorkersConfig())) as storage:
                    if storage.exists(storage.path / MANIFEST):
                        needed = self._needed(step, address, storage)
                        versions.append(OldVersion(step, address, folder, storage.size(), needed))
        return versions

    def delete(self, version: OldVersion) -> None:
        """Delete the files that a job has written into the folder, and the folder if nothing else
        is in it.

        Raises:
            ConfigError: a job has begun to run in the folder meanwhile.
        """
        with closing(open_storage(version.folder, WorkersConfig())) as storage:
            with _lock(storage):
                # The manifest is the last of JOB_FILES. It goes after the logs, so that `found`
                # still returns a folder that was deleted in part.
                for name in (*JOB_FILES[:-1], LOGS, LOCKS, MANIFEST, LOCK):
                    storage.delete(storage.path / name)
            if storage.in_place:
                with suppress(OSError):  # the folder has other files
                    storage.path.rmdir()
        self._forget(version)

    def _forget(self, version: OldVersion) -> None:
        """Remove the version from the current content of pipeline.json."""
        with closing(open_storage(self._out, WorkersConfig())) as storage:
            with locked_record(storage) as record:
                known = record.steps[version.step]
                kept = {at: v for at, v in known.versions.items() if at != version.address}
                steps = {**record.steps, version.step: replace(known, versions=kept)}
                storage.write(storage.path / RECORD, replace(record, steps=steps).text())

    def _folder(self, step: str, address: str) -> str:
        return f"{self._out}/{step_folder_name(step, address)}"

    def _needed(self, step: str, address: str, storage: Storage) -> str | None:
        """Return why a version must stay; None if it may be deleted."""
        if _is_used(storage):
            return "a worker runs there"
        for name, known in self._record.steps.items():
            if known.current is None:
                continue
            if known.versions[known.current].parents.get(step) == address:
                return f"{name} reads it"
        current = self._record.steps[step].current
        if current is not None and not self._is_complete(self._folder(step, current)):
            return f"{step} is not complete, and may copy its rows"
        return None

    def _is_complete(self, folder: str) -> bool:
        with closing(open_storage(folder, WorkersConfig())) as storage:
            try:
                return JobFolderReader(storage.path, storage).metrics.get("status") == "complete"
            except ConfigError:  # the job has not begun
                return False


def _lock(storage: Storage) -> AbstractContextManager[object]:
    """Return the lock of a folder. Raises ConfigError if another process holds it. An object store
    has no locks; there, heartbeats say which workers run."""
    return FolderLock(storage.path / LOCK) if storage.in_place else nullcontext()


def _is_used(storage: Storage) -> bool:
    """Whether a worker runs in a folder, or a process grades its rows."""
    try:
        with _lock(storage):
            reader = JobFolderReader(storage.path, storage)
            return bool(reader.metrics.get("status") == "running")
    except ConfigError:
        return True
