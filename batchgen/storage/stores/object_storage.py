"""Keeps a job's files in an object store, with a working folder on this machine; see
`job_storage.Storage`."""

from __future__ import annotations

import contextlib
import hashlib
import os
import shutil
import tempfile
import threading
import time
import uuid
from collections.abc import Callable, Collection, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from io import RawIOBase
from pathlib import Path

from batchgen.config.groups.workers_config import WorkersConfig
from batchgen.storage.leases.file_store import FolderGone
from batchgen.storage.leases.job_files import KEYS, LOCKS, ROWS
from batchgen.storage.leases.lease_files import (
    BEGUN,
    DATA,
    FINISHED,
    JOURNAL,
    LEASES,
    SESSION,
    WORKERS,
)
from batchgen.storage.leases.object_store import ObjectStore
from batchgen.storage.leases.process_identity import machine, started
from batchgen.storage.stores.job_storage import SYNC_SECONDS
from batchgen.storage.stores.object_lock import ObjectLock
from batchgen.storage.stores.range_file import ObjectFile
from batchgen.util.errors import JobError

_ROOM = 64 * 2**20
"""Bytes that stay free on the disk of the working folder."""
_FOLDERS = (DATA, JOURNAL, LEASES, WORKERS, LOCKS, "grades", "cost", "differing", KEYS, ROWS)
Stamp = tuple[int, int]
"""The time of change in nanoseconds, and the bytes, of a file."""


class ObjectStorage:
    """Keeps the files of a job as objects. Files in the working folder are copies, or wait to be
    uploaded.

    Rows go to journal files in the working folder. A thread uploads them every SYNC_SECONDS, and
    the first rows of a shard at once; a file that was uploaded is not written any more. So a worker
    that dies loses the rows of its last SYNC_SECONDS. Shards are uploaded when they are published.
    They are read in parts from the store, unless everything is downloaded (`local_copy`).
    """

    def __init__(self, store: ObjectStore, config: WorkersConfig) -> None:
        """Create storage over a store. `config` has the times of the workers' heartbeats."""
        self.display_name = store.url
        self.in_place = False
        self._store = store
        self._config = config
        self._folder = _working_folder()
        self.path = Path(self._folder.name)
        for name in (DATA, JOURNAL):
            self.make_folder(self.path / name)
        self._kept: set[str] = set()  # names of journal files that are, or were, objects
        self._announced: set[str] = set()  # the shards whose first rows were uploaded
        self._last_sync = time.monotonic()
        self._sending: list[Future[None]] = []
        self._changing = threading.Lock()
        self._sender = ThreadPoolExecutor(max_workers=1, thread_name_prefix="send")
        self._is_whole = False
        self._stamps: dict[Path, Stamp] = {}

    def names(self, folder: Path) -> list[str]:
        """The names of objects in a folder; in the journal also those of files that are not
        uploaded yet."""
        name = self._name(folder)
        local: set[str] = set()
        if name == JOURNAL and folder.is_dir():
            # Before objects are listed, so that a file which is uploaded meanwhile is not missed.
            local = {path.name for path in folder.iterdir()} - self._kept
        return [*local.union(self._store.names(name))]

    def exists(self, path: Path) -> bool:
        return path == self.path or self._store.exists(self._name(path))

    def size(self) -> int:
        return sum(self._store.sizes().values())

    def read(self, path: Path) -> bytes | None:
        return self._store.read(self._name(path))

    def modified(self, path: Path) -> float | None:
        return self._store.modified(self._name(path))

    def write(self, path: Path, text: str) -> None:
        """Write an object and its copy in the working folder."""
        with contextlib.suppress(FolderGone):
            self._store.check_session()
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(text, encoding="utf-8")
            self.upload(path)

    def mark(self, path: Path) -> None:
        self._store.overwrite(self._name(path), b"")

    def delete(self, path: Path) -> None:
        """Delete an object or all objects below a name; those of journal files later, in the
        thread."""
        if path.suffix in (FINISHED, BEGUN):
            path.unlink(missing_ok=True)
            self._submit(lambda: self._store.delete([self._name(path)]))
            return
        if path.is_dir():
            self._wait()
            shutil.rmtree(path)
        else:
            path.unlink(missing_ok=True)
        name = self._name(path)
        names = [*self._store.sizes(name)] if name in _FOLDERS else [name]
        # SESSION first: without it no lease counts, so other workers see that the job is complete.
        self._store.delete(sorted(names, key=SESSION.__ne__))

    def make_folder(self, path: Path) -> None:
        path.mkdir(parents=True, exist_ok=True)

    def download(self, path: Path) -> None:
        if not path.exists():
            self._download(path)
            self._kept.add(path.name)

    def upload(self, path: Path) -> None:
        self._store.overwrite(self._name(path), path.read_bytes())
        self._stamps[path] = _stamp(path)

    def flush(self, files: Collection[Path], force: bool) -> Collection[Path] | None:
        """End journal files and upload them."""
        self._raise_failure()
        now = time.monotonic()
        # `part-00003` of part-00003.0001.journal
        shards = {path.name.partition(".")[0] for path in files if path.suffix == FINISHED}
        is_new = not shards <= self._announced
        if force or is_new or now - self._last_sync >= SYNC_SECONDS:
            self._announced |= shards
            self._last_sync = now
            ended = tuple(files)
            if ended:
                self._submit(lambda: self._send_journals(ended))
            if force:
                self._wait()
            return ended
        return None

    def parquet(self, path: Path) -> Path | RawIOBase:
        return path if self._is_whole else ObjectFile(self._store, self._name(path))

    @contextmanager
    def local_copy(self, *, needed: bool = True) -> Iterator[None]:
        if not needed:
            yield
            return
        self._fetch_all()
        self._is_whole = True
        try:
            yield
        except BaseException:
            with contextlib.suppress(JobError):  # the first error is what the user must see
                self._send_changed()
            raise
        finally:
            self._is_whole = False
        self._send_changed()

    def store(self, owner: str, *, joins: bool) -> ObjectStore:
        return self._store

    def lock(self, wait: float) -> ObjectLock:
        self._store.probe(f"{LOCKS}/probe-{uuid.uuid4().hex}")
        return ObjectLock(self._store, self._config, wait)

    def confirm(self) -> None:
        """Do nothing: the session of this worker is checked before each upload."""

    def close(self) -> None:
        self._sender.shutdown()
        self._folder.cleanup()

    def _name(self, path: Path) -> str:
        """The name of the object for a path in the working folder."""
        relative = path.relative_to(self.path).as_posix()
        return "" if relative == "." else relative

    def _download(self, path: Path) -> None:
        name = self._name(path)
        content = self._store.read(name)
        if content is None:
            raise FileNotFoundError(f"{self.display_name}/{name}")
        path.parent.mkdir(parents=True, exist_ok=True)
        temporary = path.with_name(f".{path.name}.fetch.tmp")
        temporary.write_bytes(content)
        if (when := self._store.modified(name)) is not None:
            os.utime(temporary, (when, when))
        temporary.rename(path)
        self._stamps[path] = _stamp(path)

    def _send_journals(self, files: Collection[Path]) -> None:
        try:
            self._store.check_session()
        except FolderGone:  # others have completed the job
            return
        for path in files:
            try:
                content = path.read_bytes()
            except FileNotFoundError:  # its shard was published
                continue
            self._store.overwrite(self._name(path), content)
            self._kept.add(path.name)
        try:
            self._store.check_session()
        except FolderGone:  # others have just completed the job and deleted its journal
            self._store.delete([self._name(path) for path in files])

    def _fetch_all(self) -> None:
        """Download all files of the job into the working folder.

        Raises:
            JobError: there is no room.
        """
        unneeded = (LOCKS, LEASES, WORKERS)
        sizes = {
            self.path / name: size
            for name, size in self._store.sizes().items()
            if name.partition("/")[0] not in unneeded
        }
        missing = [path for path in sizes if not path.exists() or path not in self._stamps]
        need = sum(sizes[path] for path in missing)
        free = shutil.disk_usage(self.path).free - _ROOM
        if need > free:
            raise JobError(
                f"{self.display_name} has {need >> 20:,} MiB, and reading all of it, for grades "
                f"or a report, copies it to {self.path.parent}, where {max(free, 0) >> 20:,} MiB "
                "are free: set TMPDIR to a folder on a larger disk, or leave out what needs it "
                "(output.report=false post=[])"
            )
        for path in missing:
            with contextlib.suppress(FileNotFoundError):  # deleted meanwhile
                self._download(path)

    def _send_changed(self) -> None:
        """Upload files of the working folder that the store lacks or has in another version; delete
        objects whose files were deleted."""
        for folder, _, names in os.walk(self.path):
            top = Path(folder).relative_to(self.path).parts[:1]
            for name in names if top != (JOURNAL,) else ():
                path = Path(folder, name)
                if not name.endswith(".tmp") and self._stamps.get(path) != _stamp(path):
                    self.upload(path)
        for path in [path for path in self._stamps if not path.exists()]:
            del self._stamps[path]
            if path.relative_to(self.path).parts[0] not in (JOURNAL, DATA):
                self._store.delete([self._name(path)])

    def _submit(self, work: Callable[[], None]) -> None:
        with self._changing:
            self._sending = [f for f in self._sending if not f.done() or f.exception()]
            self._sending.append(self._sender.submit(work))

    def _raise_failure(self) -> None:
        """Raise the error of an upload that has failed."""
        with self._changing:
            done = [future for future in self._sending if future.done()]
        for future in done:
            future.result()

    def _wait(self) -> None:
        """Wait until everything is uploaded."""
        with self._changing:
            sending, self._sending = self._sending, []
        for future in sending:
            future.result()


def _stamp(path: Path) -> Stamp:
    about = path.stat()
    return about.st_mtime_ns, about.st_size


_making = threading.Lock()


def _working_folder() -> tempfile.TemporaryDirectory[str]:
    """Make a new folder for temporary files, and delete those of processes that have ended."""
    here = f"batchgen-{hashlib.sha256(machine().encode()).hexdigest()[:8]}-"
    with _making:
        for path in Path(tempfile.gettempdir()).glob(f"{here}*"):
            # batchgen-MACHINE-PID-STARTED-RANDOM, see below
            owner, _, _ = path.name.removeprefix(here).rpartition("-")
            pid, _, since = owner.partition("-")
            # Other users may make files with such names there.
            if pid.isascii() and pid.isdecimal() and started(int(pid)) != since:
                shutil.rmtree(path, ignore_errors=True)
        return tempfile.TemporaryDirectory(
            prefix=f"{here}{os.getpid()}-{started(os.getpid())}-", ignore_cleanup_errors=True
        )
