"""Carries out the operations of the protocol in an object store, such as S3."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext, suppress
from functools import partial
from pathlib import Path
from secrets import randbelow
from typing import TYPE_CHECKING, Any, TypeVar

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

if TYPE_CHECKING:
    from fsspec import AbstractFileSystem

PATIENCE = 60.0
"""For how many seconds a request is repeated that the store does not answer."""
_BLOCK = 8 * 2**20
_MOST_PAUSE = 5.0
_LEAST_PART = 5 * 2**20
"""The fewest bytes that a part may have on S3, except for the last one."""
_IN_MEMORY = threading.Lock()  # in memory nothing but this makes create-if-absent one step
T = TypeVar("T")


class ObjectStore:
    """Objects below a URL, in any store that fsspec reaches and that has create-if-absent.

    On S3, create-if-absent is a PUT with `If-None-Match: *`. A request that failed or was not
    answered in time may have happened all the same, as may one that botocore repeated. So a caller
    that learns that an object exists compares its content with its own, which no other worker
    writes differently.
    """

    def __init__(
        self,
        files: AbstractFileSystem,
        url: str,
        *,
        patience: float = PATIENCE,
        sleep: Callable[[float], None] = time.sleep,
    ) -> None:
        """Create a store over fsspec's, which must have no cache of listings; requests that are not
        answered are repeated for `patience` seconds."""
        self.url = url
        self.operations: dict[str, int] = {}
        self._files = files
        self._root: str = files._strip_protocol(url)
        self._patience = patience
        self._sleep = sleep
        self._session: bytes | None = None
        is_memory = "memory" in files.protocol
        self._creating: AbstractContextManager[Any] = _IN_MEMORY if is_memory else nullcontext()

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

    def create(self, name: str, payload: Payload, **options: Any) -> bool:
        """Make an object if there is none; returns whether it is there now with this content.
        `options` are those of fsspec's `pipe_file`."""
        content = _content(payload)

        def put() -> None:
            with self._creating:
                self._files.pipe_file(self._path(name), content, mode="create", **options)

        try:
            self._call("write", name, put)
        except (FileExistsError, FileNotFoundError) as error:
            # Not found is a multipart upload that an earlier, unanswered attempt has completed.
            if self.is_same(name, content):
                return True
            if isinstance(error, FileNotFoundError):
                raise self._no_bucket(name) from error
            return False
        return True

    def overwrite(self, name: str, content: bytes) -> None:
        """Make an object, over the one that may be there."""
        try:
            self._call("write", name, lambda: self._files.pipe_file(self._path(name), content))
        except FileNotFoundError as error:
            raise self._no_bucket(name) from error

    def read(self, name: str) -> bytes | None:
        """The content of an object; None if it is not there."""
        try:
            found: bytes = self._call("read", name, lambda: self._files.cat_file(self._path(name)))
        except FileNotFoundError:
            return None
        return found

    def read_range(self, name: str, start: int, end: int) -> bytes:
        """Some bytes of an object, or FileNotFoundError."""
        path = self._path(name)
        found: bytes = self._call(
            "read", name, lambda: self._files.cat_file(path, start=start, end=end)
        )
        return found

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
        path = self._path(folder) if folder else self._root
        try:
            found = self._call("list", folder, lambda: self._files.ls(path, False, refresh=True))
        except FileNotFoundError:
            return []
        return [name for one in found if (name := one.rstrip("/").rpartition("/")[2])]

    def sizes(self, folder: str = "") -> dict[str, int]:
        """The names of all objects in a folder, or of all, with their sizes in bytes."""
        path = self._path(folder) if folder else self._root
        found = self._call("list", folder, lambda: self._files.find(path, detail=True))
        start = len(self._root.rstrip("/")) + 1
        return {path[start:]: about["size"] for path, about in found.items()}

    def exists(self, name: str) -> bool:
        """Whether there is an object of that name, or one below it."""
        try:
            self._call("read", name, lambda: self._files.info(self._path(name), refresh=True))
        except FileNotFoundError:
            return False
        return True

    def size(self, name: str) -> int:
        """How many bytes an object has, or FileNotFoundError."""
        about = self._call("read", name, lambda: self._files.info(self._path(name), refresh=True))
        found: int = about["size"]
        return found

    def modified(self, name: str) -> float | None:
        """When an object was written last, in seconds since 1970 by the store's clock; None if it
        is not there."""
        try:
            when = self._call("read", name, lambda: self._files.modified(self._path(name)))
        except FileNotFoundError:
            return None
        found: float = when.timestamp()
        return found

    def delete(self, names: Sequence[str]) -> None:
        """Delete objects, of which others may have deleted some."""
        for name in names:
            path = self._path(name)
            with suppress(FileNotFoundError):
                self._call("delete", name, partial(self._files.rm_file, path))

    def probe(self, name: str) -> None:
        """Make sure that objects can be written here and that none is made twice, or raise
        ConfigError.

        On S3 a large shard is uploaded in parts, and the request that ends them makes the object:
        there are stores that heed If-None-Match in a PUT and not in that request.
        """
        try:
            first = self.create(name, b"1")
            second = self.create(name, b"2")
            in_parts = False
            if "s3" in self._files.protocol and not second:
                in_parts = self.create(name, bytes(2 * _LEAST_PART), chunksize=_LEAST_PART)
            self.delete([name])
        except JobError as error:
            raise ConfigError(f"output.dir={self.url} cannot be written: {error}") from None
        if not first or second or in_parts:
            where = " at the end of an upload in parts" if in_parts else ""
            raise ConfigError(
                f"output.dir={self.url}: this store makes an object that is there already "
                f"(it does not heed If-None-Match{where}), so workers could not agree in it, nor "
                "be kept from overwriting each other: use another store, or a folder, and copy it "
                "when the job is complete"
            )

    def _path(self, name: str) -> str:
        return f"{self._root}/{name}"

    def _call(self, what: str, name: str, request: Callable[[], T]) -> T:
        """Repeat a request until it is answered, FileNotFoundError and FileExistsError being
        answers."""
        until = time.monotonic() + self._patience
        pause = 0.1
        while True:
            try:
                return request()
            except FileNotFoundError:
                raise
            except Exception as error:
                if isinstance(error, FileExistsError) or _is_there_already(error):
                    raise FileExistsError(name) from error
                if (why := _refusal(error)) is None and time.monotonic() < until:
                    self._sleep(pause * (0.5 + randbelow(1000) / 1000))
                    pause = min(2 * pause, _MOST_PAUSE)
                    continue
                url = f"{self.url}/{name}".rstrip("/")
                told = str(error).strip() or type(error).__name__
                raise JobError(f"cannot {what} {url}: {why or told}") from error

    def _no_bucket(self, name: str) -> JobError:
        return JobError(
            f"cannot write {self.url}/{name}: there is no such bucket, or its endpoint is another "
            "one (AWS_ENDPOINT_URL)"
        )


def connect(url: str) -> ObjectStore:
    """The store that a URL names, with what the environment and fsspec's
    configuration say of it."""
    import fsspec

    scheme = url.partition("://")[0]
    try:
        files = fsspec.filesystem(scheme, skip_instance_cache=True, use_listings_cache=False)
    except ImportError:
        raise ConfigError(f"{url}: S3 needs the package s3fs: pip install 'batchgen[s3]'") from None
    return ObjectStore(files, url)


def _content(payload: Payload) -> bytes:
    return payload.read_bytes() if isinstance(payload, Path) else payload


def _is_there_already(error: BaseException) -> bool:
    """Whether a store says that the object to be created is there (412 Precondition Failed)."""
    response = getattr(error.__cause__, "response", None) or getattr(error, "response", None)
    code = str(response["Error"].get("Code")) if response else ""
    return code in ("PreconditionFailed", "412")


def _refusal(error: BaseException) -> str | None:
    """Why a store will not answer otherwise later; None if it may."""
    if isinstance(error, PermissionError):
        return f"no permission ({error})"
    if type(error).__name__ in ("NoCredentialsError", "PartialCredentialsError"):
        return (
            "no credentials: set AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY, AWS_PROFILE, or "
            "another way that the AWS tools know"
        )
    if isinstance(error, (TypeError, ValueError, NotImplementedError, AttributeError)):
        return f"{type(error).__name__}: {error}"
    return None
