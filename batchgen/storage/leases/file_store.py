"""Carries out the operations of the lease protocol in a folder, local or NFS.

`lease_protocol.py` yields operations on named objects; here an object is a file.
"""

from __future__ import annotations

import contextlib
import errno
import filecmp
import itertools
import os
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

from batchgen.storage.leases.fsync import fsync_path
from batchgen.storage.leases.lease_files import DATA, LEASES, WORKERS
from batchgen.storage.leases.patience import patiently
from batchgen.storage.leases.store_operations import (
    Create,
    Names,
    Operation,
    Overwrite,
    Payload,
    Read,
    Same,
)
from batchgen.util.errors import JobError

# Errors of file systems that have no hard links.
_NO_LINKS = (errno.EPERM, errno.EOPNOTSUPP, errno.ENOSYS, errno.EMLINK, errno.EXDEV)


class FolderGone(Exception):
    """The folders of the workers have been deleted, because the job is complete."""


class FileStore:
    """A store whose objects are files, which appear whole or not at all.

    A file is written under a temporary name in `workers/` and then linked to its name, which fails
    if that name exists (link(2)). On NFS, where the answer may be lost, the two names are compared
    instead. When the job is complete, `workers/` is deleted: from then on a worker that was paused
    can change nothing.
    """

    def __init__(
        self, folder: Path, owner: str, confirm: Callable[[], None] = lambda: None
    ) -> None:
        """Create a store.

        Args:
            owner: a text unique to this worker, for the names of temporary files.
            confirm: raises an error unless the folder is still that of this job; called before
                leases are listed, and before files are published or overwritten.
        """
        self._folder = folder
        self._owner = owner
        self._confirm = confirm
        self.operations: dict[str, int] = {}

    def fence(self, session: bytes) -> None:
        """Do nothing: the lock of the folder already decides which process may write."""

    def do(self, operation: Operation) -> Any:
        """Carry out an operation and return its answer, see `store_operations.py`.

        Raises:
            FolderGone: the folder of the object does not exist.
            FolderLost: the job's whole folder does not exist.
            JobError: a file cannot be written or read.
        """
        kind = type(operation).__name__
        self.operations[kind] = self.operations.get(kind, 0) + 1
        is_reading = isinstance(operation, Read | Same | Names)
        path = self._folder / (operation.folder if isinstance(operation, Names) else operation.name)
        if isinstance(operation, Overwrite) or path.name == LEASES or path.parent.name == DATA:
            self._confirm()
        attempts = itertools.count()
        try:
            return patiently(lambda: self._once(operation, path, is_again=next(attempts) > 0))
        except FileNotFoundError as error:
            raise FolderGone(str(error.filename)) from None
        except OSError as error:
            what = f"read {path}" if is_reading else f"write {error.filename or path}"
            raise JobError(f"cannot {what}: {error.strerror or error}") from error

    def _once(self, operation: Operation, path: Path, *, is_again: bool) -> Any:
        match operation:
            case Create(_, payload):
                if is_again:  # the earlier attempt may have linked the temporary file
                    self._temporary(path).unlink(missing_ok=True)
                return self._create(path, payload) or (is_again and self._same(path, payload))
            case Overwrite(_, payload):
                return self._overwrite(path, payload)
            case Read():
                return self._read(path)
            case Same(_, payload):
                return self._same(path, payload)
            case Names():
                return os.listdir(path)

    def _create(self, path: Path, payload: Payload) -> bool:
        if isinstance(payload, bytes):
            is_new = self._write(path, payload)
        else:
            is_new = _link(payload, path, self._temporary(path))
        if is_new and path.parent.name == DATA:
            fsync_path(path.parent)
        return is_new

    def _write(self, path: Path, content: bytes) -> bool:
        temporary = self._temporary(path)
        temporary.write_bytes(content)
        is_new = _link(temporary, path, temporary)
        temporary.unlink(missing_ok=True)
        return is_new

    def _overwrite(self, path: Path, payload: Payload) -> None:
        is_kept = path.parent.name != WORKERS  # a heartbeat need not outlast a power loss
        temporary = self._temporary(path)
        if isinstance(payload, bytes):
            temporary.write_bytes(payload)
            if is_kept:
                fsync_path(temporary)
        else:
            _link(payload, temporary, self._temporary(temporary))
        temporary.replace(path)
        if is_kept:
            fsync_path(path.parent)

    def _read(self, path: Path) -> bytes | None:
        try:
            return path.read_bytes()
        except FileNotFoundError:
            return None

    def _same(self, path: Path, payload: Payload) -> bool:
        if isinstance(payload, bytes):
            return self._read(path) == payload
        return path.exists() and filecmp.cmp(path, payload, shallow=False)

    def _temporary(self, path: Path) -> Path:
        return self._folder / WORKERS / f".{path.name}.{self._owner}.tmp"


def _link(source: Path, path: Path, temporary: Path) -> bool:
    """Give a file another name, if that name is free; return whether the file has the name now."""
    try:
        os.link(source, path)
    except FileExistsError:
        # On NFS the link may be ours, if the answer to the first try was lost.
        return os.path.samefile(source, path)
    except OSError as error:
        if error.errno not in _NO_LINKS:
            raise
        return _copy(source, path, temporary)
    return True


def _copy(source: Path, path: Path, temporary: Path) -> bool:
    """Copy instead of linking, on a file system without links.

    A lease is written with one call. A shard is copied and renamed; if two workers do so at the
    same time, the second file replaces an equal one.
    """
    if path.parent.name not in (LEASES, WORKERS):
        if path.exists():
            return False
        shutil.copyfile(source, temporary)
        temporary.replace(path)
        return True
    content = source.read_bytes()
    try:
        lease = path.open("xb", buffering=0)
    except FileExistsError:
        return False
    with lease:
        try:
            if lease.write(content) == len(content):
                return True
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), str(path))
        except OSError:
            # If the file stays, it is a lease without an owner, which others take over in the end.
            with contextlib.suppress(OSError):
                path.unlink()
            raise
