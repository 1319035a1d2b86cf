"""The journal keeps the rows of incomplete shards safe from a kill at any moment.

Each worker writes one file for each of its shards, such as `part-00003.0001.journal`. The second
number is the worker's: a file has one writer, and later workers have higher numbers. A file is a
sequence of frames: `uint32 length, uint32 crc32, payload`, little endian. The first payload is an
Arrow IPC schema message, every other payload an Arrow IPC record batch. A batch is appended with
one unbuffered write; from then on it survives `kill -9`.

Every `SYNC_SECONDS` the storage makes new batches safe, so that the loss of the machine costs at
most the rows that finished since. Files in a folder are fsynced. An object store cannot append:
there a file is ended and uploaded, and the worker continues in `part-00003.0001.2.journal`. A
reader stops at a frame that does not match its length or checksum; no later worker appends to such
a file.

Next to a worker's file of finished rows there may be a file of rows that it has begun,
`part-00003.0001.begun` (`begun_rows.py`). It has the same frames. Losing it costs only time.
"""

import os
import re
import struct
import zlib
from collections.abc import Iterable, Iterator
from pathlib import Path

import pyarrow as pa

from batchgen.storage.leases.lease_files import BEGUN, FINISHED
from batchgen.storage.leases.patience import patiently
from batchgen.storage.shards.checked_file import unreadable_file
from batchgen.storage.stores.folder_storage import FolderStorage
from batchgen.storage.stores.job_storage import Storage
from batchgen.util.errors import JobError

_FRAME = struct.Struct("<II")
# Shard, worker, number of the file among the worker's files of the shard, and kind.
_NAME = re.compile(r"part-([0-9]{5,})\.([0-9]{4,})(?:\.([0-9]+))?(\.journal|\.begun)")


class JournalGone(Exception):
    """The file to append to was deleted, because another worker has published its shard."""


class Journal:
    """The journal files of a job's folder, as one worker writes and reads them.

    Attributes:
        attempt: the number of this worker, in the names of its files.
    """

    def __init__(
        self,
        folder: Path,
        schema: pa.Schema,
        least_attempt: int = 1,
        attempt: int | None = None,
        storage: Storage | None = None,
        begun: pa.Schema | None = None,
    ) -> None:
        """Start to write in a folder that exists.

        Args:
            schema: the columns of finished rows.
            least_attempt: if `attempt` is None, the number is at least this one, and above those of
                all files.
            attempt: the number of this worker.
            begun: the columns of the records of begun rows.
        """
        self._storage = FolderStorage(folder.parent) if storage is None else storage
        self._folder = folder
        self._schemas = {FINISHED: schema, BEGUN: begun}
        self._files = self._journal_files()
        if attempt is None:
            attempt = max(least_attempt, 1 + max(attempts_in(self._storage.names(folder))))
        self.attempt = attempt
        self._written_here: set[Path] = set()  # the files that this worker has written
        # (kind, shard) → the number of this worker's file that is being written.
        self._parts: dict[tuple[str, int], int] = {}
        self._unsynced: set[Path] = set()

    def _journal_files(self) -> dict[str, dict[int, list[Path]]]:
        names = self._storage.names(self._folder)
        return {kind: journal_files(self._folder, names, kind) for kind in self._schemas}

    def delete_unfinished(self) -> None:
        """Delete the temporary files that earlier attempts were writing when they were killed."""
        for name in self._storage.names(self._folder):
            if name.endswith(".tmp"):
                self._storage.delete(self._folder / name)

    def shards(self, kind: str = FINISHED) -> set[int]:
        """Shards that have journal files."""
        return set(self._files[kind])

    def refresh(self) -> None:
        """Note which files other workers have written or deleted since the last call."""
        try:
            self._files = self._journal_files()
        except FileNotFoundError:  # the job is complete
            self._files = {kind: {} for kind in self._schemas}

    def files(self, shard: int, *, include_own: bool = False, kind: str = FINISHED) -> list[Path]:
        """The files of a shard that other workers have written; with `include_own` also those of
        this worker."""
        return [
            path
            for path in self._files[kind].get(shard, ())
            if include_own or path not in self._written_here
        ]

    def append(self, shard: int, batch: pa.RecordBatch, kind: str = FINISHED) -> None:
        """Append rows of one shard.

        Raises:
            JobError: the file cannot be written. The rows before it are safe.
            FolderLost: the folder is not this job's any more.
            JournalGone: the file was deleted, because the shard is published.
        """
        part = self._parts.get((kind, shard), 1)
        more = f".{part}" if part > 1 else ""
        path = self._folder / f"part-{shard:05d}.{self.attempt:04d}{more}{kind}"
        files = self._files[kind].setdefault(shard, [])
        data = _frame(batch.serialize())
        flags = os.O_WRONLY | os.O_APPEND | os.O_CLOEXEC
        if path not in self._written_here:
            self._storage.confirm()
            self._written_here.add(path)
            files.append(path)
            schema = self._schemas[kind]
            assert schema is not None
            data = _frame(schema.serialize()) + data
            flags |= os.O_CREAT
        # The file is opened for each batch, because a job with small shards may have more
        # incomplete shards than a process may have open files.
        try:
            fd = os.open(path, flags, 0o666)
            try:
                _write_all(fd, data)
            finally:
                os.close(fd)
        except FileNotFoundError as error:
            raise JournalGone(path) from error
        except OSError as error:
            raise JobError(f"cannot write {path}: {error.strerror or error}") from error
        self._unsynced.add(path)

    def read(self, shard: int) -> Iterator[tuple[int, pa.RecordBatch]]:
        """Yield all whole batches of finished rows of the shard in the order in which they were
        written, each with the number of its attempt. They are memory-mapped, so nothing is
        copied."""
        for path in self._files[FINISHED].get(shard, ()):
            for batch in self.batches(path):
                yield journal_worker(path), batch

    def batches(self, path: Path) -> Iterator[pa.RecordBatch]:
        """Yield the whole batches of one file.

        Raises:
            FileNotFoundError: the file was deleted.
        """
        self._storage.download(path)
        yield from read_file(path, self._schemas[path.suffix])

    def sync(self, force: bool = False) -> None:
        """Make appended batches safe from the loss of the machine, if SYNC_SECONDS have passed or
        `force` is set."""
        ended = self._storage.flush(self._unsynced, force)
        if ended is None:
            return
        for path in ended:
            shard, _, part = _numbers(path)
            self._parts[path.suffix, shard] = part + 1
        self._unsynced.clear()

    def release(self, shard: int, kind: str = FINISHED) -> list[Path]:
        """Forget a complete shard and return its files, which can be deleted once the shard is
        published."""
        files = self._files[kind].pop(shard, [])
        self._unsynced.difference_update(files)
        return files


def journal_files(
    folder: Path, names: Iterable[str], kind: str = FINISHED
) -> dict[int, list[Path]]:
    """The journal files of a kind among these names, by shard; those of earlier workers come
    first."""
    files: dict[int, list[Path]] = {}
    for name in names:
        if (match := _NAME.fullmatch(name)) and match[4] == kind:
            files.setdefault(int(match[1]), []).append(folder / name)
    return {shard: sorted(files[shard], key=_numbers) for shard in sorted(files)}


def attempts_in(names: Iterable[str]) -> list[int]:
    """The numbers of the workers that wrote the journal files among these names, and 0."""
    return [0, *(int(match[2]) for name in names if (match := _NAME.fullmatch(name)))]


def journal_worker(path: Path) -> int:
    """The number of the worker that wrote a journal file."""
    _, worker, _ = _numbers(path)
    return worker


def _numbers(path: Path) -> tuple[int, int, int]:
    """The shard and the worker of a journal file, and its number among the worker's files of the
    shard."""
    match = _NAME.fullmatch(path.name)
    assert match is not None
    return int(match[1]), int(match[2]), int(match[3] or 1)


def read_file(path: Path, schema: pa.Schema | None = None) -> Iterator[pa.RecordBatch]:
    """Yield the whole batches of one journal file, up to the first torn or damaged frame.

    Raises:
        FileNotFoundError: the file was deleted.
        JobError: its columns are not those of `schema`, or it cannot be read. None allows any
            columns.
    """
    try:
        if patiently(path.stat).st_size == 0:  # an empty file cannot be memory-mapped
            return
        with patiently(lambda: pa.memory_map(str(path))) as mapped:
            frames = _frames(mapped.read_buffer())
    except FileNotFoundError:
        raise
    except OSError as error:
        raise unreadable_file(path, error) from error
    head = next(frames, None)
    if head is None:
        return
    written = pa.ipc.read_schema(head)
    if schema is not None and not written.equals(schema):
        raise JobError(
            f"{path} has other columns than this job writes, so it comes from another version of "
            "batchgen: finish the job with that version, or use another output.dir"
        )
    for payload in frames:
        yield pa.ipc.read_record_batch(payload, written)


def _frames(data: pa.Buffer) -> Iterator[pa.Buffer]:
    """Yield the payloads of the frames, up to the first damaged one."""
    offset = 0
    while offset + _FRAME.size <= data.size:
        length, checksum = _FRAME.unpack(data.slice(offset, _FRAME.size))
        offset += _FRAME.size
        # After a power loss a file may end with zeros, which read as a length of 0.
        if length == 0 or offset + length > data.size:
            return
        payload = data.slice(offset, length)
        if zlib.crc32(payload) != checksum:
            return
        yield payload
        offset += length


def _frame(payload: pa.Buffer) -> bytes:
    data: bytes = payload.to_pybytes()
    return _FRAME.pack(len(data), zlib.crc32(data)) + data


def _write_all(fd: int, data: bytes) -> None:
    view = memoryview(data)
    while view:
        view = view[os.write(fd, view) :]
