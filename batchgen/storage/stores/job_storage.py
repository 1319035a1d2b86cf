"""Where the files of a job's folder are kept: in that folder, or in a store that workers share."""

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
        """The names of what is in a folder. Raises FileNotFoundError if it is not there."""
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
