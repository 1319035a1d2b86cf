"""Carries out the operations of the protocol in an object store, such as S3."""

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
"""For how many seconds a request is repeated that the store does not answer."""
_BLOCK = 8 * 2**20
_MOST_PAUSE = 5.0
T = TypeVar("T")


class Objects(Protocol):
    """The requests that a store answers, each of which is one step for all who make them.

    FileNotFoundError and FileExistsError are answers, PermissionError and ValueError refusals. Any
    other OSError says nothing of whether the request has happened.
    """

    def create(self, name: str, content: bytes) -> None:
        """Make an object, or raise FileExistsError; FileNotFoundError if there is no bucket."""

    def overwrite(self, name: str, content: bytes) -> None:
        """Make an object, over the one that may be there."""

    def read(self, name: str, start: int = 0, end: int | None = None) -> bytes:
        """The bytes of an object, or those from `start` up to `end`."""

    def about(self, name: str) -> tuple[int, float]:
        """How many bytes an object has, and when it was written, in seconds since 1970."""

    def names(self, folder: str) -> list[str]:
        """The names of what is in a folder, "" for the topmost, without the folder."""

    def sizes(self, folder: str) -> dict[str, int]:
        """The names of all objects below a folder, with it, and their sizes in bytes."""

    def delete(self, name: str) -> None:
        """Delete an object, if it is there."""


class ObjectStore:
    """Objects below a URL, in any store that has create-if-absent.

    On S3, create-if-absent is a PUT with `If-None-Match: *`. A request that failed or was not
    answered in time may have happened all the same. So a caller that learns that an object exists
    compares its content with its own, which no other worker writes differently.
    """

    def __init__(
        self,
        objects: Objects,
        url: str,
        *,
        patience: float = PATIENCE,
        sleep: Callable[[float], None] = time.sleep,
    ) -> None:
        """Create a store over objects, whose requests are repeated for `patience` seconds while
        they are not answered."""
        self.url = url
        self.operations: dict[str, int] = {}
        self._objects = objects
        self._patience = patience
        self._sleep = sleep
        self._session: bytes | None = None

    def do(self, operation: Operation) -> Any:
        """Carry out an operation and return its answer.

        Raises:
            FolderGone: the job is complete.
            JobError: the store refuses or does not answer, or others have opened the job anew.
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
        """See `batchgen.storage.stores.job_storage.Store`."""
        self._session = session

    def check_session(self) -> None:
        """Make sure that the session of this worker, if it has one, goes on.

        Raises:
            FolderGone: the job is complete.
            JobError: others took this worker for dead and opened the job anew.
        """
        if self._session is None:
            return
        found = self.read(SESSION)
        if found is None:
            raise FolderGone(f"{self.url}/{SESSION}")
        if found != self._session:
            raise JobError(
                f"{self.url}: this worker was not heard of for longer than workers.stale_after, "
                "and the job was opened anew meanwhile; its finished rows are safe. Run the same "
                "command to take part again"
            )

    def create(self, name: str, payload: Payload) -> bool:
        """Make an object if there is none; returns whether it is there now with this content."""
        content = _content(payload)
        try:
            self._call("write", name, lambda: self._objects.create(name, content))
        except FileExistsError:
            return self.is_same(name, content)
        except FileNotFoundError as error:
            raise self._no_bucket(name) from error
        return True

    def overwrite(self, name: str, content: bytes) -> None:
        """Make an object, over the one that may be there."""
        try:
            self._call("write", name, lambda: self._objects.overwrite(name, content))
        except FileNotFoundError as error:
            raise self._no_bucket(name) from error

    def read(self, name: str) -> bytes | None:
        """The content of an object; None if it is not there."""
        try:
            return self._call("read", name, lambda: self._objects.read(name))
        except FileNotFoundError:
            return None

    def read_range(self, name: str, start: int, end: int) -> bytes:
        """Some bytes of an object, or FileNotFoundError."""
        return self._call("read", name, lambda: self._objects.read(name, start, end))

    def is_same(self, name: str, payload: Payload) -> bool:
        """Whether an object has this content; False if it is not there."""
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
        """The names of what is in a folder, without the folder; none if there is no such folder."""
        try:
            return self._call("list", folder, lambda: self._objects.names(folder))
        except FileNotFoundError:
            return []

    def sizes(self, folder: str = "") -> dict[str, int]:
        """The names of all objects in a folder, or of all, with their sizes in bytes."""
        return self._call("list", folder, lambda: self._objects.sizes(folder))

    def exists(self, name: str) -> bool:
        """Whether there is an object of that name, or one below it."""
        try:
            self.size(name)
        except FileNotFoundError:
            return bool(self.names(name))
        return True

    def size(self, name: str) -> int:
        """How many bytes an object has, or FileNotFoundError."""
        return self._call("read", name, lambda: self._objects.about(name))[0]

    def modified(self, name: str) -> float | None:
        """When an object was written last, in seconds since 1970 by the store's clock; None if it
        is not there."""
        try:
            return self._call("read", name, lambda: self._objects.about(name))[1]
        except FileNotFoundError:
            return None

    def delete(self, names: Sequence[str]) -> None:
        """Delete objects, of which others may have deleted some."""
        for name in names:
            with suppress(FileNotFoundError):
                self._call("delete", name, partial(self._objects.delete, name))

    def probe(self, name: str) -> None:
        """Make sure that objects can be written here and that none is made twice, or raise
        ConfigError."""
        try:
            first = self.create(name, b"1")
            second = self.create(name, b"2")
            self.delete([name])
        except JobError as error:
            raise ConfigError(f"output.dir={self.url} cannot be written: {error}") from None
        if not first or second:
            raise ConfigError(
                f"output.dir={self.url}: this store makes an object that is there already "
                "(it does not heed If-None-Match), so workers could not agree in it, nor be kept "
                "from overwriting each other: use another store, or a folder, and copy it when "
                "the job is complete"
            )

    def _call(self, what: str, name: str, request: Callable[[], T]) -> T:
        """Repeat a request until it is answered, FileNotFoundError and FileExistsError being
        answers."""
        until = time.monotonic() + self._patience
        pause = 0.1
        while True:
            try:
                return request()
            except (FileNotFoundError, FileExistsError):
                raise
            except (OSError, ValueError) as error:
                refused = isinstance(error, (PermissionError, ValueError))
                if not refused and time.monotonic() < until:
                    self._sleep(pause * (0.5 + randbelow(1000) / 1000))
                    pause = min(2 * pause, _MOST_PAUSE)
                    continue
                url = f"{self.url}/{name}".rstrip("/")
                why = str(error).strip() or type(error).__name__
                raise JobError(f"cannot {what} {url}: {why}") from error

    def _no_bucket(self, name: str) -> JobError:
        return JobError(
            f"cannot write {self.url}/{name}: there is no such bucket, or its endpoint is another "
            "one (AWS_ENDPOINT_URL)"
        )


def _content(payload: Payload) -> bytes:
    return payload.read_bytes() if isinstance(payload, Path) else payload
