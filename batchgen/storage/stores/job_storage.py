"""Where the files of a job's folder are kept: in that folder, or in a store that workers share."""

from __future__ import annotations

import contextlib
import os
import shutil
import time
from collections.abc import Collection, Iterator
from contextlib import AbstractContextManager, contextmanager
from io import RawIOBase
from pathlib import Path
from typing import Any, Protocol

from batchgen.storage.leases.file_store import FileStore, FolderGone
from batchgen.storage.leases.folder_lock import FolderLock
from batchgen.storage.leases.fsync import fsync_path
from batchgen.storage.leases.lease_files import LEASES, WORKERS
from batchgen.storage.leases.own_files import LOCK
from batchgen.storage.leases.patience import patiently
from batchgen.storage.leases.store_operations import Operation, Overwrite
from batchgen.storage.stores.whole_file import write_atomic
from batchgen.util.errors import ConfigError, JobError
from batchgen.util.temporary import temporary_name

SYNC_SECONDS = 10.0
"""Seconds after which finished rows are safe from the loss of the machine."""


class Store(Protocol):
    """What the protocol of the workers runs on; `operations` counts what was
    carried out, by kind."""

    operations: dict[str, int]

    def do(self, operation: Operation) -> Any:
        """Carry out an operation and return its answer.

        Raises:
            FolderGone: the job is complete, and what its workers shared is deleted.
            JobError: an object cannot be written or read.
        """
        ...

    def fence(self, session: bytes) -> None:
        """Write from now on only as long as the workers' session has this content.

        By this a worker that stood still learns that others have taken the folder since, where
        there is no lock that the system drops with a process.
        """
        ...


class Lock(Protocol):
    """A lock on a job's folder; `exclusive` says whether nobody else holds it."""

    exclusive: bool

    def in_use(self) -> ConfigError:
        """The error for a process that may not share the folder with its holders."""
        ...

    def confirm(self) -> None:
        """Make sure that the lock is still held as it was taken.

        Raises:
            JobError: another process took it exclusively while this one stood still.
            FolderLost: the folder was deleted or replaced.
        """
        ...

    def share(self) -> None:
        """Let others share the lock."""
        ...

    def __exit__(self, *_: object) -> None: ...


class Storage(Protocol):
    """Keeps the files of a job's folder.

    Files are named by their paths in a working folder of this machine. New files are written there,
    and others can be read there once they were downloaded. Methods that write raise JobError if
    they cannot.

    Attributes:
        path: the working folder.
        shown: what people call the job's folder: its path or its URL.
        in_place: whether the working folder is the job's, where all that is published appears.
    """

    @property
    def path(self) -> Path: ...

    @property
    def display_name(self) -> str: ...

    @property
    def in_place(self) -> bool: ...

    def names(self, folder: Path) -> list[str]:
        """The names of what is in a folder, or FileNotFoundError."""
        ...

    def exists(self, path: Path) -> bool:
        """Whether a file is there."""
        ...

    def size(self) -> int:
        """How many bytes all files of the job's folder have."""
        ...

    def read(self, path: Path) -> bytes | None:
        """The content of a small file; None if it is not there."""
        ...

    def modified(self, path: Path) -> float | None:
        """When a file was written last, in seconds since 1970; None if it is not there."""
        ...

    def write(self, path: Path, text: str) -> None:
        """Make a small file whole, over one that may be there. A worker, which has a `store`,
        writes nothing if others have completed the job."""
        ...

    def mark(self, path: Path) -> None:
        """Make an empty file."""
        ...

    def delete(self, path: Path) -> None:
        """Delete a file or a folder, which may be gone already. To other workers it disappears at
        once."""
        ...

    def make_folder(self, path: Path) -> None:
        """Make a folder in which this process is to write files."""
        ...

    def download(self, path: Path) -> None:
        """Have the content of a finished file in the working folder, or raise FileNotFoundError."""
        ...

    def upload(self, path: Path) -> None:
        """Make a file of the working folder one of the job's."""
        ...

    def flush(self, files: Collection[Path], force: bool) -> Collection[Path] | None:
        """Make journal files safe from the loss of this machine if it is time to, or at once with
        `force`.

        Returns:
            The files to which nothing must be added any more; None if it was not time.
        """
        ...

    def parquet(self, path: Path) -> Path | RawIOBase:
        """What pyarrow can read a Parquet file of the job from."""
        ...

    def local_copy(self, *, needed: bool = True) -> AbstractContextManager[None]:
        """Have all that is finished in the working folder, for what reads and adds files there.

        At the end of the body, what it added or changed becomes the job's. Unless it is `needed`,
        nothing is done.
        """
        ...

    def store(self, owner: str, *, joins: bool) -> Store:
        """What the workers agree through. `owner` is a text that no other worker has; if no worker
        `joins`, the folders of workers are made."""
        ...

    def lock(self, wait: float) -> Lock:
        """Take the folder's lock exclusively, or share it if it is shared, waiting up to `wait`
        seconds.

        Raises:
            ConfigError: another job holds it, or there are no such locks.
            OSError: the lock cannot be written.
        """
        ...

    def confirm(self) -> None:
        """Make sure that the folder is still the locked one, or raise FolderLost."""
        ...

    def close(self) -> None:
        """Delete what is of no use without this object."""
        ...


class FolderStorage:
    """The job's folder is the working folder, on a file system that all workers see."""

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
        found = (Path(folder, name) for folder, _, names in os.walk(self.path) for name in names)
        return sum(path.lstat().st_size for path in found)

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
        """A file is where it is read."""

    def upload(self, path: Path) -> None:
        """A file is where it was written."""

    def flush(self, files: Collection[Path], force: bool) -> Collection[Path] | None:
        """fsync the files. More can be added to them."""
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
        """All of it stays."""


def _delete_folder(path: Path) -> None:
    """Delete a folder so that all in it is gone at once, unless the disk has no room for that."""
    gone = temporary_name(path)
    try:
        path.rename(gone)
    except FileNotFoundError:  # others were faster
        return
    except OSError:
        gone = path
    shutil.rmtree(gone)


def names_in(storage: Storage, folder: str) -> list[str]:
    """The names of what is in a folder of a job; none if it is not there, as a journal is not once
    the job is complete."""
    try:
        return storage.names(storage.path / folder)
    except (FileNotFoundError, NotADirectoryError):
        return []
