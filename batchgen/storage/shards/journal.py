"""The journal keeps the rows of incomplete shards safe from a kill at any moment.

Each worker writes one file for each of its shards, such as `part-00003.0001.journal`. The second
number is the worker's: a file has one writer, and later workers have higher numbers. A file is a
sequence of frames: `uint32 length, uint32 crc32, payload`, little endian. The first payload is an
Arrow IPC schema message, every other one an Arrow IPC record batch. A batch is appended with one
unbuffered write, so that it survives `kill -9` from then on. Every `SYNC_SECONDS` the storage makes
what is new safe, so that the loss of the machine costs at most the rows that finished since: files
in a folder are fsynced; those for an object store, where nothing can be appended, are ended and
uploaded, and the worker goes on in `part-00003.0001.2.journal`. A reader leaves out an end that
does not match its length or checksum; no later worker appends to such a file.

Beside a worker's file of finished rows may lie one of what it has begun, `part-00003.0001.begun`
(`begun_rows`). It is made of such frames, too, and nothing is lost with it but time.
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
_NAME = re.compile(r"part-([0-9]{5,})\.([0-9]{4,})(?:\.([0-9]+))?(\.journal|\.begun)")


class JournalGone(Exception):
    """Raised if the file to append to was deleted: another worker has published its shard."""


class Journal:
    """The journal files of a job's folder, with one schema for each kind; `attempt` numbers this
    worker's own."""

    def __init__(
        self,
        folder: Path,
        schema: pa.Schema,
        least_attempt: int = 1,
        attempt: int | None = None,
        storage: Storage | None = None,
        begun: pa.Schema | None = None,
    ) -> None:
        """Start a new attempt in a folder that exists, of which files with `begun` rows have a
        schema of their own.

        Its number is `attempt`, or else at least `least_attempt` and above those of all files.
        """
        self._storage = FolderStorage(folder.parent) if storage is None else storage
        self._folder = folder
        self._schemas = {FINISHED: schema, BEGUN: begun}
        self._files = self._found()
        if attempt is None:
            attempt = max(least_attempt, 1 + max(attempts_in(self._storage.names(folder))))
        self.attempt = attempt
        self._own: set[Path] = set()
        # By kind and shard: which file of this worker's is written.
        self._parts: dict[tuple[str, int], int] = {}
        self._unsynced: set[Path] = set()

    def _found(self) -> dict[str, dict[int, list[Path]]]:
        names = self._storage.names(self._folder)
        return {kind: journal_files(self._folder, names, kind) for kind in self._schemas}

    def delete_unfinished(self) -> None:
        """Delete what earlier attempts were writing under temporary names when they were killed."""
        for name in self._storage.names(self._folder):
            if name.endswith(".tmp"):
                self._storage.delete(self._folder / name)

    def shards(self, kind: str = FINISHED) -> set[int]:
        """Shards that have journal files."""
        return set(self._files[kind])

    def refresh(self) -> None:
        """See which files other workers have written or deleted since."""
        try:
            self._files = self._found()
        except FileNotFoundError:  # the job is complete
            self._files = {kind: {} for kind in self._schemas}

    def files(self, shard: int, *, include_own: bool = False, kind: str = FINISHED) -> list[Path]:
        """The files of a shard that other workers have written, or all."""
        return [
            path
            for path in self._files[kind].get(shard, ())
            if include_own or path not in self._own
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
        if path not in self._own:
            self._storage.confirm()
            self._own.add(path)
            files.append(path)
            schema = self._schemas[kind]
            assert schema is not None
            data = _frame(schema.serialize()) + data
            flags |= os.O_CREAT
        # The file is opened anew each time: a job with small shards has more incomplete ones than a
        # process may have open files.
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
        """All whole batches of finished rows of the shard in the order in which they were written,
        each with the number of its attempt. They are memory-mapped, so nothing is copied."""
        for path in self._files[FINISHED].get(shard, ()):
            for batch in self.batches(path):
                yield journal_worker(path), batch

    def batches(self, path: Path) -> Iterator[pa.RecordBatch]:
        """The whole batches of one file. Raises FileNotFoundError if it was deleted."""
        self._storage.download(path)
        yield from read_file(path, self._schemas[path.suffix])

    def sync(self, force: bool = False) -> None:
        """Make what was appended safe from the loss of the machine, if SYNC_SECONDS have passed or
        by `force`."""
        ended = self._storage.flush(self._unsynced, force)
        if ended is None:
            return
        for path in ended:
            shard, _, part = _place(path)
            self._parts[path.suffix, shard] = part + 1
        self._unsynced.clear()

    def release(self, shard: int, kind: str = FINISHED) -> list[Path]:
        """Forget a complete shard and return its files, to be deleted once it is published."""
        files = self._files[kind].pop(shard, [])
        self._unsynced.difference_update(files)
        return files


def journal_files(
    folder: Path, names: Iterable[str], kind: str = FINISHED
) -> dict[int, list[Path]]:
    """From a shard to its journal files of a kind among these names, earlier workers first."""
    files: dict[int, list[Path]] = {}
    for name in names:
        if (match := _NAME.fullmatch(name)) and match[4] == kind:
            files.setdefault(int(match[1]), []).append(folder / name)
    return {shard: sorted(files[shard], key=_place) for shard in sorted(files)}


def attempts_in(names: Iterable[str]) -> list[int]:
    """The numbers of the workers that wrote the journal files of any kind among these names; 0 is
    there as well."""
    return [0, *(int(match[2]) for name in names if (match := _NAME.fullmatch(name)))]


def journal_worker(path: Path) -> int:
    """The number of the worker that wrote a journal file."""
    return _place(path)[1]


def _place(path: Path) -> tuple[int, int, int]:
    """The shard, the worker, and which of that worker's files of the shard a journal file is."""
    match = _NAME.fullmatch(path.name)
    assert match is not None
    return int(match[1]), int(match[2]), int(match[3] or 1)


def read_file(path: Path, schema: pa.Schema | None = None) -> Iterator[pa.RecordBatch]:
    """The whole batches of one journal file, up to the first torn or damaged frame.

    Raises:
        FileNotFoundError: it was deleted.
        JobError: its schema is not `schema`, which None leaves open, or it cannot be read.
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
