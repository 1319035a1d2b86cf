"""The interface to the place where the files of a job's folder are kept: that folder, or an object
store that workers share.

`folder_storage.py` and `object_storage.py` implement `Storage`. A *session* is the time in which
workers share a job: it begins when the first of them opens the job, and its content is that of
`lease_files.SESSION`.
"""

from __future__ import annotations

from collections.abc import Collection
from contextlib import AbstractContextManager
from io import RawIOBase
from pathlib import Path
from typing import Any, Protocol

from batchgen.storage.leases.store_operations import Operation
from batchgen.util.errors import ConfigError

SYNC_SECONDS = 10.0
"""Seconds after which finished rows are safe from the loss of the machine."""


class Store(Protocol):
    """Carries out the operations of the workers' protocol.

    Attributes:
        operations: kind of operation → how many were carried out.
    """

    operations: dict[str, int]

    def do(self, operation: Operation) -> Any:
        """Carry out an operation and return its answer.

        Raises:
            FolderGone: the job is complete, and the files of its workers are deleted.
            JobError: an object cannot be written or read.
        """
        ...

    def fence(self, session: bytes) -> None:
        """Write from now on only while the workers' session has this content.

        An object store has no lock that the system releases with a process. There a worker that was
        paused learns by this that others have taken the job since. In a folder it does nothing.
        """
        ...


class Lock(Protocol):
    """A lock on a job's folder.

    Attributes:
        exclusive: whether no other process holds it.
    """

    exclusive: bool

    def in_use(self) -> ConfigError:
        """The error for a process that may not share the folder with those that hold the lock."""
        ...

    def confirm(self) -> None:
        """Check that the lock is still held as it was taken.

        Raises:
            JobError: another process took it exclusively while this one was paused.
            FolderLost: the folder was deleted or replaced.
        """
        ...

    def share(self) -> None:
        """Allow other processes to share the lock."""
        ...

    def __exit__(self, *_: object) -> None:
        """Release the lock, which was taken when the object was made."""
        ...


class Storage(Protocol):
    """Keeps the files of a job's folder.

    Files are named by their paths in a working folder of this machine. New files are written there,
    and others can be read there after a download. Methods that write raise JobError if they cannot.

    Attributes:
        path: the working folder.
        display_name: what people call the job's folder: its path or its URL.
        in_place: whether the working folder is the job's folder, where everything published
            appears.
    """

    @property
    def path(self) -> Path: ...

    @property
    def display_name(self) -> str: ...

    @property
    def in_place(self) -> bool: ...

    def names(self, folder: Path) -> list[str]:
        """The names of the entries of a folder.

        Raises:
            FileNotFoundError: there is no such folder.
        """
        ...

    def exists(self, path: Path) -> bool:
        """Whether a file exists."""
        ...

    def size(self) -> int:
        """The bytes of all files of the job's folder."""
        ...

    def read(self, path: Path) -> bytes | None:
        """The content of a small file; None if it does not exist."""
        ...

    def modified(self, path: Path) -> float | None:
        """The time at which a file was last written, in seconds since 1970; None if it does not
        exist."""
        ...

    def write(self, path: Path, text: str) -> None:
        """Write a small file as a whole, in place of an older one. A worker, which has a `store`,
        writes nothing if others have completed the job."""
        ...

    def mark(self, path: Path) -> None:
        """Make an empty file."""
        ...

    def delete(self, path: Path) -> None:
        """Delete a file or a folder, if it exists. For other workers it disappears at once."""
        ...

    def make_folder(self, path: Path) -> None:
        """Make a folder in which this process can write files."""
        ...

    def download(self, path: Path) -> None:
        """Copy a finished file into the working folder, if it is not there.

        Raises:
            FileNotFoundError: there is no such file.
        """
        ...

    def upload(self, path: Path) -> None:
        """Make a file of the working folder a file of the job."""
        ...

    def flush(self, files: Collection[Path], force: bool) -> Collection[Path] | None:
        """Make journal files safe from the loss of this machine, if it is time to or with `force`.

        Returns:
            The files to which nothing may be appended any more, because they are objects now, and
            objects cannot grow; none in a folder. None if it was not time.
        """
        ...

    def parquet(self, path: Path) -> Path | RawIOBase:
        """The object from which pyarrow reads a Parquet file of the job."""
        ...

    def local_copy(self, *, needed: bool = True) -> AbstractContextManager[None]:
        """A context in which all finished files are in the working folder.

        Files that its body adds or changes become the job's at the end. Without `needed` it does
        nothing.
        """
        ...

    def store(self, owner: str, *, joins: bool) -> Store:
        """The store through which workers coordinate.

        `owner` is a text that no other worker has. Unless this worker `joins` others, the folders
        of workers are made.
        """
        ...

    def lock(self, wait: float) -> Lock:
        """Take the folder's lock exclusively, or share it if it is already shared; wait up to
        `wait` seconds.

        Raises:
            ConfigError: another job holds it, or the folder's file system has no such locks.
            OSError: the lock cannot be written.
        """
        ...

    def confirm(self) -> None:
        """Check that the folder is still the locked one, or raise FolderLost."""
        ...

    def close(self) -> None:
        """Delete the files that are useless without this object."""
        ...
