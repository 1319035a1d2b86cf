"""Prints the rows of a job as they finish, until the job ends, for `batchgen show --follow`."""

from __future__ import annotations

import os
import time
from collections.abc import Iterator
from pathlib import Path

import pyarrow as pa

from batchgen.pages.rows.printed_rows import RowPrinter, of_sample
from batchgen.storage.folder.job_summary import status_line
from batchgen.storage.folder.read_job import JobFolderReader
from batchgen.storage.folder.read_shard import BATCH
from batchgen.storage.shards.checked_file import CheckedFile
from batchgen.storage.shards.journal import journal_files, read_file
from batchgen.storage.shards.row_order import KEYS, row_keys
from batchgen.storage.shards.shard_files import shard_files, shard_path

LOOK_SECONDS = 1.0
"""Seconds between two looks at the job's folder."""


def follow_rows(
    reader: JobFolderReader, view: RowPrinter, name: str, sample: int | None, *, as_json: bool
) -> int:
    """Print rows that finish from now on, until the job is complete, stopped or killed. Returns the
    exit code, 0.

    Args:
        reader: the job's folder.
        view: prints rows.
        name: the folder's name, as the user typed it.
        sample: print only this sample of each row; None prints all.
    """
    new = NewRows(reader.path)
    if not as_json:
        print(status_line(reader, name), flush=True)
    if is_over(reader):
        return 0
    while True:
        # Check before the last look, so that this look sees all rows that the job has written.
        ends = is_over(reader)
        for batch in new.look():
            view.print(of_sample(batch.select(view.needed).to_pylist(), sample))
        if ends:
            break
        time.sleep(LOOK_SECONDS)
    if not as_json:
        print("\n" + status_line(reader, name))
    return 0


def is_over(reader: JobFolderReader) -> bool:
    """Whether the job has stopped running."""
    metrics = reader.metrics
    return metrics["status"] != "running" if metrics else not reader.may_run


class NewRows:
    """Finds the rows that a job has finished since the last look, in the order in which they
    finished.

    The rows are in the journals. Rows that were written and published between two looks are in
    shards.
    """

    def __init__(self, folder: Path) -> None:
        """Record which rows the folder has now, so that `look` does not yield them."""
        self._folder = folder
        self._read: dict[Path, tuple[int, int]] = {}  # journal file → bytes and batches read
        self._seen: dict[int, set[int]] = {}  # shard with journals → keys of its known rows
        self._published: dict[int, int] = {}  # shard → modification time of its file
        for _ in self.look(is_first=True):
            pass

    def look(self, *, is_first: bool = False) -> Iterator[pa.RecordBatch]:
        """Yield the rows that are new since the last look. The first look does not read published
        shards."""
        folder = self._folder / "journal"
        try:
            journals = journal_files(folder, os.listdir(folder))
        except FileNotFoundError:  # a complete job has none
            journals = {}
        for shard, files in journals.items():
            if shard not in self._seen:
                self._seen[shard] = self._published_keys(shard)
            for path in files:
                for batch in self._new_batches(path):
                    self._seen[shard].update(row_keys(batch).tolist())
                    yield batch
        data = self._folder / "data"
        for shard, path in shard_files(data).items() if data.is_dir() else ():
            time_written = path.stat().st_mtime_ns
            if self._published.get(shard) != time_written:
                self._published[shard] = time_written
                seen = self._seen.pop(shard, set())
                yield from () if is_first else _unseen(path, seen)

    def _new_batches(self, path: Path) -> list[pa.RecordBatch]:
        """Return the batches that were appended to a journal file since the last look."""
        size, num_read = self._read.get(path, (0, 0))
        try:
            if path.stat().st_size == size:
                return []
            size = path.stat().st_size
            batches = list(read_file(path))
        except FileNotFoundError:  # its shard was published
            return []
        self._read[path] = size, len(batches)
        return batches[num_read:]

    def _published_keys(self, shard: int) -> set[int]:
        """Return the keys of the rows in a published shard, which now gets more rows or
        replacements; empty if the shard was not published."""
        path = shard_path(self._folder / "data", shard)
        if shard not in self._published:
            return set()
        with CheckedFile(path) as file:
            return set(row_keys(file.read(KEYS)).tolist())


def _unseen(path: Path, seen: set[int]) -> Iterator[pa.RecordBatch]:
    """Yield the rows of a published shard whose keys are not in `seen`."""
    with CheckedFile(path) as file:
        if file.metadata.num_rows == len(seen):
            return
        for batch in file.batches(BATCH):
            is_new = [key not in seen for key in row_keys(batch).tolist()]
            if any(is_new):
                yield batch.filter(pa.array(is_new))
