"""The storage of a job whose folder is on a file system, see `job_storage.Storage`."""

from __future__ import annotations

import contextlib
import os
import shutil
import time
from collections.abc import Collection, Iterator
from contextlib import contextmanager
from pathlib import Path

from batchgen.storage.leases.file_store import FileStore, FolderGone
from batchgen.storage.leases.folder_lock import FolderLock
from batchgen.storage.leases.fsync import fsync_path
from batchgen.storage.leases.job_files import LOCK
from batchgen.storage.leases.lease_files import LEASES, WORKERS
from batchgen.storage.leases.patience import patiently
from batchgen.storage.leases.store_operations import Overwrite
from batchgen.storage.stores.job_storage import SYNC_SECONDS, Storage
from batchgen.storage.stores.whole_file import write_atomic
from batchgen.util.errors import JobError
from batchgen.util.temporary import temporary_name


class FolderStorage:
    """Keeps the files of a job in its folder, on a file system that all workers see."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.display_name = str(path)
        self.in_place = True
        self._store: FileStore | None = None
        self._lock: FolderLock | None = None
        self._last_sync = time.monotonic()

    def names(self, folder: Path) -> list[str]:
        return patiently(lambda: os.listdir(folder))

    def exists(self, path: Path) -> bool:
        return path.exists()

    def size(self) -> int:
        files = (Path(folder, name) for folder, _, names in os.walk(self.path) for name in names)
        return sum(path.lstat().st_size for path in files)

    def read(self, path: Path) -> bytes | None:
        try:
            return patiently(path.read_bytes)
        except FileNotFoundError:
            return None

    def modified(self, path: Path) -> float | None:
        try:
            return patiently(path.stat).st_mtime
        except FileNotFoundError:
            return None

    def write(self, path: Path, text: str) -> None:
        if self._store is None:
            write_atomic(path, text)
            return
        with contextlib.suppress(FolderGone):
            self._store.do(Overwrite(path.relative_to(self.path).as_posix(), text.encode()))

    def mark(self, path: Path) -> None:
        try:
            path.touch()
        except OSError as error:
            raise JobError(f"cannot write {path}: {error.strerror or error}") from error

    def delete(self, path: Path) -> None:
        if path.is_dir() and not path.is_symlink():
            _delete_folder(path)
        else:
            path.unlink(missing_ok=True)

    def make_folder(self, path: Path) -> None:
        path.mkdir(parents=True, exist_ok=True)

    def download(self, path: Path) -> None:
        """Do nothing: the file is already where it is read."""

    def upload(self, path: Path) -> None:
        """Do nothing: the file is already in the job's folder."""

    def flush(self, files: Collection[Path], force: bool) -> Collection[Path] | None:
        """fsync the files. They can be appended to afterwards."""
        now = time.monotonic()
        if not force and now - self._last_sync < SYNC_SECONDS:
            return None
        for path in (*files, *{path.parent for path in files}):
            # Another worker may have published the shard of a file, or completed the job.
            with contextlib.suppress(FileNotFoundError):
                fsync_path(path)
        self._last_sync = now
        return ()

    def parquet(self, path: Path) -> Path:
        return path

    @contextmanager
    def local_copy(self, *, needed: bool = True) -> Iterator[None]:
        yield

    def store(self, owner: str, *, joins: bool) -> FileStore:
        for name in () if joins else (LEASES, WORKERS):
            (self.path / name).mkdir(exist_ok=True)
        self._store = FileStore(self.path, owner, self.confirm)
        return self._store

    def confirm(self) -> None:
        if self._lock is not None:
            self._lock.confirm()

    def lock(self, wait: float) -> FolderLock:
        self._lock = FolderLock(self.path / LOCK, join=True, wait=wait)
        return self._lock

    def close(self) -> None:
        """Do nothing: the folder stays."""


def _delete_folder(path: Path) -> None:
    """Delete a folder so that everything in it disappears at once, unless the disk has no room for
    that."""
    gone = temporary_name(path)
    try:
        path.rename(gone)
    except FileNotFoundError:  # another process has deleted it
        return
    except OSError:
        gone = path
    shutil.rmtree(gone)


def names_in(storage: Storage, folder: str) -> list[str]:
    """The names of the entries of a job's folder `folder`; none if it does not exist, as the
    journal of a complete job."""
    try:
        return storage.names(storage.path / folder)
    except (FileNotFoundError, NotADirectoryError):
        return []
