"""The folder `keys` of a job: the key of each finished row, by which later jobs find rows to copy.

Each worker appends to one file for each of its shards, such as `part-00003.5b2f9c01.keys`; the
second part of the name belongs to the worker. A file is a sequence of records of 36 bytes, little
endian: `int64 row_index, int32 sample_index, uint32 crc32 of the row's tokens, the key (16 bytes),
uint32 crc32 of the record up to here`. A record is written just after its row went into the
journal. So there may be a row without a record, or a record without its row. Either way a later job
computes the row instead of copying it; the data are right.
"""

from __future__ import annotations

import os
import re
import time
import zlib
from collections.abc import Iterable, Sequence
from pathlib import Path

import numpy as np
import numpy.typing as npt

from batchgen.engine.interface.outputs import RequestOutput
from batchgen.jobs.reuse.row_key import KEY_BYTES
from batchgen.storage.leases.job_files import KEYS
from batchgen.storage.shards.output_schema import FinishedRow
from batchgen.storage.stores.job_storage import SYNC_SECONDS, Storage
from batchgen.util.errors import JobError

RECORD = np.dtype(
    [
        ("row_index", "<i8"),
        ("sample_index", "<i4"),
        ("tokens", "<u4"),
        ("key", f"V{KEY_BYTES}"),
        ("crc", "<u4"),
    ]
)
Records = npt.NDArray[np.void]
_NAME = re.compile(r"part-([0-9]{5,})\.[0-9a-f]{8}\.keys")


class KeyLog:
    """Appends the keys of the rows that one worker has finished."""

    def __init__(self, storage: Storage, rows_per_shard: int) -> None:
        """Make the folder.

        Raises:
            JobError: the folder cannot be made.
        """
        self._storage, self._size = storage, rows_per_shard
        self._folder = storage.path / KEYS
        self._suffix = os.urandom(4).hex()  # in the names of this worker's files
        self._unsent: set[Path] = set()
        self._next_send = time.monotonic() + SYNC_SECONDS
        try:
            storage.make_folder(self._folder)
        except OSError as error:
            raise _unwritable(self._folder, error) from error

    def append(self, rows: Iterable[FinishedRow]) -> None:
        """Append the keys of rows that were written, except those without an answer."""
        shards: dict[int, list[bytes]] = {}
        for row in rows:
            if row.key is not None and row.failure is None and row.output is not None:
                record = _record(row.row_index, row.sample_index, row.output, row.key)
                shards.setdefault(row.row_index // self._size, []).append(record)
        for shard, records in shards.items():
            self._write(self._folder / f"part-{shard:05d}.{self._suffix}.keys", b"".join(records))
        if time.monotonic() >= self._next_send:
            self.send()

    def send(self) -> None:
        """Upload the records that were appended since the last call, so that other machines see
        them."""
        self._next_send = time.monotonic() + SYNC_SECONDS
        for path in self._unsent:
            self._storage.upload(path)
        self._unsent.clear()

    def _write(self, path: Path, content: bytes) -> None:
        try:
            with path.open("ab", buffering=0) as file:
                written = file.write(content)
        except FileNotFoundError:  # the folder was deleted: writing to the journal reports that
            return
        except OSError as error:
            raise _unwritable(path, error) from error
        if written != len(content):
            raise JobError(f"cannot write {path}: the disk is full")
        if not self._storage.in_place:
            self._unsent.add(path)


def read_keys(storage: Storage) -> dict[int, Records]:
    """Read the records of a job by shard, without incomplete records; empty if the job kept no
    keys."""
    try:
        names = storage.names(storage.path / KEYS)
    except (FileNotFoundError, NotADirectoryError):
        return {}
    by_shard: dict[int, list[Records]] = {}
    for name in sorted(names):
        if match := _NAME.fullmatch(name):
            content = storage.read(storage.path / KEYS / name)
            if content is not None:  # None: deleted just now
                by_shard.setdefault(int(match[1]), []).append(parsed(content))
    return {shard: np.concatenate(by_shard[shard]) for shard in sorted(by_shard)}


def parsed(content: bytes) -> Records:
    """The records of a file, up to the first one that is torn or damaged."""
    records = np.frombuffer(content, RECORD, count=len(content) // RECORD.itemsize)
    view, body = memoryview(content), RECORD.itemsize - 4
    for number, crc in enumerate(records["crc"].tolist()):
        start = number * RECORD.itemsize
        if zlib.crc32(view[start : start + body]) != crc:
            return records[:number]
    return records


def tokens_crc(token_ids: Sequence[int], finish_reason: str) -> int:
    """The checksum that shows whether a record belongs to a row with these tokens."""
    return zlib.crc32(np.asarray(token_ids, "<i4").tobytes() + finish_reason.encode())


def _record(row_index: int, sample: int, output: RequestOutput, key: bytes) -> bytes:
    """A record as bytes."""
    crc = tokens_crc(output.token_ids, output.finish_reason)
    record = np.array([(row_index, sample, crc, key, 0)], RECORD).tobytes()[:-4]
    return record + zlib.crc32(record).to_bytes(4, "little")


def _unwritable(path: Path, error: OSError) -> JobError:
    return JobError(f"cannot write {path}: {error.strerror or error}")
