"""Prints the rows of a job as they finish, until the job ends, for `batchgen show --follow`."""

from __future__ import annotations

import os
import time
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc

from batchgen.pages.rows.printed_rows import RowPrinter, of_sample
from batchgen.storage.folder.job_summary import status_line
from batchgen.storage.folder.read_job import JobFolderReader
from batchgen.storage.folder.read_shard import BATCH
from batchgen.storage.shards.checked_file import CheckedFile
from batchgen.storage.shards.journal import journal_files, read_file
from batchgen.storage.shards.row_order import KEYS, row_keys
from batchgen.storage.shards.shard_files import shard_files

LOOK_SECONDS = 1.0
"""Seconds between two looks at the job's folder."""
Ints = npt.NDArray[np.int64]
_STATE = (*KEYS, "finish_reason")  # the columns that `_states` reads
_NO_STATES: Ints = np.empty(0, np.int64)


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
    if not as_json:
        print(status_line(reader, name), flush=True)
    if is_over(reader):
        return 0
    new = NewRows(reader.path)
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
    shards. A job that grows, or computes its errors again, replaces a shard by one with its rows
    and new ones.
    """

    def __init__(self, folder: Path) -> None:
        """Record which rows the folder has now, so that `look` does not yield them."""
        self._folder = folder
        self._read: dict[Path, tuple[int, int]] = {}  # journal file → bytes and batches read
        self._known: dict[int, Ints] = {}  # shard → `_states` of its rows up to the last look
        self._published: dict[int, int] = {}  # shard → modification time of its file
        for _ in self.look(is_first=True):
            pass

    def look(self, *, is_first: bool = False) -> Iterator[pa.RecordBatch]:
        """Yield the rows that are new since the last look. The first look yields no rows of
        published shards."""
        # Journals are read first, so that a shard which is published meanwhile is not missed.
        folder = self._folder / "journal"
        try:
            journals = journal_files(folder, os.listdir(folder))
        except FileNotFoundError:  # a complete job has none
            journals = {}
        for shard, files in journals.items():
            for path in files:
                for batch in self._new_batches(path):
                    states = _states(batch)
                    # Two workers may compute a row. A row whose error is computed again may fail
                    # again, so errors always count as new.
                    is_new = self._learn(shard, states) | (states & 1 == 1)
                    if is_new.any():
                        yield batch.filter(pa.array(is_new))
        data = self._folder / "data"
        for shard, path in shard_files(data).items() if data.is_dir() else ():
            time_written = path.stat().st_mtime_ns
            if self._published.get(shard) != time_written:
                self._published[shard] = time_written
                with CheckedFile(path) as file:
                    is_new = self._learn(shard, _states(file.read(_STATE)))
                    if not is_first and is_new.any():
                        yield from _chosen(file, is_new)

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

    def _learn(self, shard: int, states: Ints) -> npt.NDArray[np.bool_]:
        """Record rows of a shard by their `_states` [R]. Returns [R], whether each was unknown."""
        known = self._known.get(shard, _NO_STATES)
        self._known[shard] = np.union1d(known, states)
        return ~np.isin(states, known)


def _states(rows: pa.RecordBatch | pa.Table) -> Ints:
    """[R] The key of each row and whether it has an error, in one number: an answer that replaces
    an error is new."""
    is_error = np.asarray(pc.equal(rows["finish_reason"], "error"))
    states: Ints = row_keys(rows) << 1 | is_error
    return states


def _chosen(file: CheckedFile, is_chosen: npt.NDArray[np.bool_]) -> Iterator[pa.RecordBatch]:
    """Yield the rows of a published shard for which `is_chosen` [R] is True."""
    first = 0
    for batch in file.batches(BATCH):
        of_batch = is_chosen[first : first + batch.num_rows]
        first += batch.num_rows
        if of_batch.any():
            yield batch.filter(pa.array(of_batch))
