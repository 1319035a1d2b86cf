"""Carries out the operations of the workers' protocol (`lease_protocol.py`) in an object store,
such as S3."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from functools import partial
from pathlib import Path
from secrets import randbelow
from typing import Any, Protocol, TypeVar

from batchgen.storage.leases.file_store import FolderGone
from batchgen.storage.leases.lease_files import DATA, LEASES, SESSION
from batchgen.storage.leases.store_operations import (
    Create,
    Names,
    Operation,
    Overwrite,
    Payload,
    Read,
    Same,
)
from batchgen.util.errors import ConfigError, JobError

PATIENCE = 60.0
"""Seconds for which a request is repeated while the store does not answer it."""
_BLOCK = 8 * 2**20  # bytes that are compared at a time
_MOST_PAUSE = 5.0  # seconds between two attempts
T = TypeVar("T")


class Objects(Protocol):
    """The requests that an object store must support, each of them atomic.

    FileNotFoundError and FileExistsError are answers; PermissionError and ValueError are refusals.
    After any other OSError the request may have been carried out or not.
    """

    def create(self, name: str, content: bytes) -> None:
        """Make an object.

        Raises:
            FileExistsError: there is one already.
            FileNotFoundError: there is no bucket.
        """

    def overwrite(self, name: str, content: bytes) -> None:
        """Write an object, whether it exists or not."""

    def read(self, name: str, start: int = 0, end: int | None = None) -> bytes:
        """The bytes of an object, or those from `start` up to `end`."""

    def about(self, name: str) -> tuple[int, float]:
        """The size of an object in bytes, and when it was written, in seconds since 1970."""

    def names(self, folder: str) -> list[str]:
        """The names of the objects and folders in a folder, without its path; "" is the top
        folder."""

    def sizes(self, folder: str) -> dict[str, int]:
        """The sizes in bytes of all objects below a folder, by their whole names."""

    def delete(self, name: str) -> None:
        """Delete an object, if it exists."""


class ObjectStore:
    """A store of objects below a URL, in any object store that has create-if-absent.

    On S3, create-if-absent is a PUT with `If-None-Match: *`. A request that failed or was not
    answered in time may still have been carried out. So if the object exists, `create` compares its
    content with the content to write; equal contents are a success.

    Attributes:
        url: the URL.
        operations: the number of operations of each kind that were carried out.
    """

    def __init__(
        self,
        objects: Objects,
        url: str,
        *,
        patience: float = PATIENCE,
        sleep: Callable[[float], None] = time.sleep,
    ) -> None:
        """Create a store. Requests are repeated for `patience` seconds while they are not
        answered."""
        self.url = url
        self.operations: dict[str, int] = {}
        self._objects = objects
        self._patience = patience
        self._sleep = sleep
        self._session: bytes | None = None

    def do(self, operation: Operation) -> Any:
        """Carry out an operation and return its answer, see `store_operations.py`.

        Raises:
            FolderGone: the job is complete.
            JobError: the store refuses or does not answer, or others have opened the job again.
        """
        kind = type(operation).__name__
        self.operations[kind] = self.operations.get(kind, 0) + 1
        match operation:
            case Create(name, payload):
                if name.startswith(f"{DATA}/"):
                    self.check_session()
                return self.create(name, payload)
            case Overwrite(name, payload):
                self.check_session()
                return self.overwrite(name, _content(payload))
            case Read(name):
                return self.read(name)
            case Same(name, payload):
                return self.is_same(name, payload)
            case Names(folder):
                names = self.names(folder)
                if folder == LEASES and self._session is not None:
                    if SESSION.removeprefix(f"{LEASES}/") not in names:
                        raise FolderGone(f"{self.url}/{LEASES}")
                return names

    def fence(self, session: bytes) -> None:
        """Set the session of this worker. From now on data are not written if the object SESSION
        has other content, which means that other workers have opened the job again."""
        self._session = session

    def check_session(self) -> None:
        """Check that the session of this worker still goes on. Without a session nothing is
        checked.

        Raises:
            FolderGone: the job is complete.
            JobError: others took this worker for dead and opened the job again.
        """
        if self._session is None:
            return
        session = self.read(SESSION)
        if session is None:
            raise FolderGone(f"{self.url}/{SESSION}")
        if session != self._session:
            raise JobError(
                f"{self.url}: this worker did not report for longer than workers.stale_after, "
                "and meanwhile the job was opened again without it. Its finished rows are safe. "
                "Run the same command to join again"
            )

    def create(self, name: str, payload: Payload) -> bool:
        """Make an object unless there is one; return whether the object now has this content."""
        content = _content(payload)
        try:
            self._call("write", name, lambda: self._objects.create(name, content))
        except FileExistsError:
            return self.is_same(name, content)
        except FileNotFoundError as error:
            raise self._no_bucket(name) from error
        return True

    def overwrite(self, name: str, content: bytes) -> None:
        """Write an object, whether it exists or not."""
        try:
            self._call("write", name, lambda: self._objects.overwrite(name, content))
        except FileNotFoundError as error:
            raise self._no_bucket(name) from error

    def read(self, name: str) -> bytes | None:
        """The content of an object; None if it does not exist."""
        try:
            return self._call("read", name, lambda: self._objects.read(name))
        except FileNotFoundError:
            return None

    def read_range(self, name: str, start: int, end: int) -> bytes:
        """The bytes of an object from `start` up to `end`.

        Raises:
            FileNotFoundError: there is no such object.
        """
        return self._call("read", name, lambda: self._objects.read(name, start, end))

    def is_same(self, name: str, payload: Payload) -> bool:
        """Whether an object has this content; False if it does not exist."""
        if isinstance(payload, bytes):
            return self.read(name) == payload
        try:
            if self.size(name) != payload.stat().st_size:
                return False
            with payload.open("rb") as file:
                at = 0
                while block := file.read(_BLOCK):
                    if self.read_range(name, at, at + len(block)) != block:
                        return False
                    at += len(block)
        except FileNotFoundError:
            return False
        return True

    def names(self, folder: str) -> list[str]:
        """The names of the objects and folders in a folder, without its path; empty if there is no
        such folder."""
        try:
            return self._call("list", folder, lambda: self._objects.names(folder))
        except FileNotFoundError:
            return []

    def sizes(self, folder: str = "") -> dict[str, int]:
        """The sizes in bytes of all objects below a folder, by their names. The folder "" has all
        objects."""
        return self._call("list", folder, lambda: self._objects.sizes(folder))

    def exists(self, name: str) -> bool:
        """Whether there is an object of that name, or an object below it."""
        try:
            self.size(name)
        except FileNotFoundError:
            return bool(self.names(name))
        return True

    def size(self, name: str) -> int:
        """The size of an object in bytes.

        Raises:
            FileNotFoundError: there is no such object.
        """
        size, _ = self._call("read", name, lambda: self._objects.about(name))
        return size

    def modified(self, name: str) -> float | None:
        """The time at which an object was last written, in seconds since 1970 by the store's clock;
        None if it does not exist."""
        try:
            _, written = self._call("read", name, lambda: self._objects.about(name))
        except FileNotFoundError:
            return None
        return written

    def delete(self, names: Sequence[str]) -> None:
        """Delete objects; missing ones are ignored."""
        for name in names:
            with suppress(FileNotFoundError):
                self._call("delete", name, partial(self._objects.delete, name))

    def probe(self, name: str) -> None:
        """Write a test object of this name and delete it again.

        Raises:
            ConfigError: the store cannot be written, or does not honour create-if-absent.
        """
        try:
            first = self.create(name, b"1")
            second = self.create(name, b"2")
            self.delete([name])
        except JobError as error:
            raise ConfigError(f"output.dir={self.url} cannot be written: {error}") from None
        if not first or second:
            raise ConfigError(
                f"output.dir={self.url}: this store overwrites objects that exist already (it "
                "ignores If-None-Match), so workers could overwrite each other's shards: use "
                "another store, or a folder, and copy it when the job is complete"
            )

    def _call(self, action: str, name: str, request: Callable[[], T]) -> T:
        """Repeat a request until it is answered. FileNotFoundError and FileExistsError are answers.

        Raises:
            JobError: the store refuses the `action`, or does not answer for `patience` seconds.
        """
        deadline = time.monotonic() + self._patience
        pause = 0.1
        while True:
            try:
                return request()
            except (FileNotFoundError, FileExistsError):
                raise
            except (OSError, ValueError) as error:
                refused = isinstance(error, (PermissionError, ValueError))
                if not refused and time.monotonic() < deadline:
                    self._sleep(pause * (0.5 + randbelow(1000) / 1000))
                    pause = min(2 * pause, _MOST_PAUSE)
                    continue
                url = f"{self.url}/{name}".rstrip("/")
                why = str(error).strip() or type(error).__name__
                raise JobError(f"cannot {action} {url}: {why}") from error

    def _no_bucket(self, name: str) -> JobError:
        return JobError(
            f"cannot write {self.url}/{name}: there is no such bucket, or AWS_ENDPOINT_URL names "
            "another store"
        )


def _content(payload: Payload) -> bytes:
    return payload.read_bytes() if isinstance(payload, Path) else payload
