"""Writes a folder with Parquet files in `data`, a card and SET_FILE. The folder appears whole or
not at all.

`select` and `export` use `write_folder`. SET_FILE (selection.json) says from which jobs the rows
came.
"""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from hashlib import blake2b
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq

from batchgen.pipelines.publish.finished_rows import SET_FILE, set_digest, set_facts, whole_set
from batchgen.storage.folder.whole_shards import whole_shards
from batchgen.storage.leases.folder_lock import FolderLock
from batchgen.storage.leases.fsync import fsync_path
from batchgen.storage.shards.checked_file import seal
from batchgen.storage.shards.shard_files import shard_path
from batchgen.storage.stores.folder_storage import FolderStorage
from batchgen.util.errors import ConfigError, JobError
from batchgen.util.paths import is_url, user_path

ROWS_PER_GROUP = 1000
"""The rows of a row group, the unit that readers hold in memory."""
ROWS_PER_SHARD = 10 * ROWS_PER_GROUP


def request_digest(request: Mapping[str, Any]) -> str:
    """Return the digest of a request: of everything that decides the content of a folder."""
    text = json.dumps(request, sort_keys=True, ensure_ascii=False)
    return blake2b(text.encode(), digest_size=16).hexdigest()


def new_folder(job_path: str) -> Path:
    """Return the path of the folder that the user names for a new set. Raises ConfigError for an
    object store."""
    if is_url(job_path):
        raise ConfigError(
            f"--out {job_path}: a set can only be written to a folder of this machine: name one"
        )
    return user_path(job_path, "--out")


def is_there(path: Path, request: str) -> bool:
    """Whether a folder already has the result of a request.

    Args:
        request: the digest of the request.

    Raises:
        ConfigError: the folder has other content.
        JobError: the folder has the result, but some of it is missing or damaged.
    """
    if not os.path.lexists(path):
        return False
    if path.is_dir() and (path / SET_FILE).is_file() and set_facts(path)["request"] == request:
        whole_set(path, str(path))
        return True
    if path.is_dir() and not any(path.iterdir()):
        return False
    raise ConfigError(
        f"--out {path} exists already and holds something else, or rows of other options: name "
        "another folder, or delete it first"
    )


@contextmanager
def whole_folder(path: Path) -> Iterator[Path]:
    """Yield a new hidden folder next to `path`, which is renamed to `path` if the body ends without
    an error.

    Leftovers of a killed process are deleted. The folder is locked against a second process.

    Raises:
        ConfigError: another process is writing the same folder.
        JobError: the folder cannot be written.
    """
    hidden, lock = (path.with_name(f".{path.name}.{end}") for end in ("unfinished", "lock"))
    try:
        with ExitStack() as stack:
            path.parent.mkdir(parents=True, exist_ok=True)
            stack.enter_context(_lock(path, lock))
            shutil.rmtree(hidden, ignore_errors=True)
            (hidden / "data").mkdir(parents=True)
            stack.callback(shutil.rmtree, hidden, ignore_errors=True)
            yield hidden
            for folder in (hidden / "data", hidden):
                fsync_path(folder)
            hidden.rename(path)  # fails unless `path` is absent or an empty folder
            fsync_path(path.parent)
            lock.unlink(missing_ok=True)
    except OSError as error:
        raise JobError(f"cannot write {path}: {error.strerror or error}") from error


def _lock(path: Path, lock: Path) -> FolderLock:
    try:
        return FolderLock(lock)
    except ConfigError:
        raise ConfigError(f"--out {path}: another process is writing it: wait for it") from None


class ShardWriter:
    """Writes rows into Parquet shards of ROWS_PER_SHARD rows.

    Attributes:
        rows: the number of rows written so far.
    """

    def __init__(self, folder: Path, schema: pa.Schema) -> None:
        self._data, self._schema = folder / "data", schema
        self._waiting: list[pa.Table] = []  # the rows of the next row group
        self._writer: pq.ParquetWriter | None = None
        self._shard, self._in_shard = 0, 0  # the number of the shard, and its rows so far
        self.rows = 0

    def add(self, table: pa.Table) -> None:
        """Write rows, which have the columns of the schema. Rows short of a full row group are held
        back."""
        while table.num_rows:
            waiting = sum(part.num_rows for part in self._waiting)
            self._waiting.append(table.slice(0, ROWS_PER_GROUP - waiting))
            table = table.slice(ROWS_PER_GROUP - waiting)
            if waiting + self._waiting[-1].num_rows == ROWS_PER_GROUP:
                self._write_group()

    def close(self) -> None:
        """Write the rows that were held back, and end the last shard. A set without rows has one
        empty shard."""
        if self._waiting or not self.rows:
            self._write_group()
        self._end_shard()

    def _write_group(self) -> None:
        if self._writer is None:
            path = shard_path(self._data, self._shard)
            self._writer = pq.ParquetWriter(
                path, self._schema, compression="zstd", write_page_checksum=True
            )
        # The empty table makes a table of the right columns if no rows are waiting.
        table = pa.concat_tables([self._schema.empty_table(), *self._waiting])
        self._writer.write_table(table, row_group_size=max(1, table.num_rows))
        self._waiting = []
        self._in_shard += table.num_rows
        self.rows += table.num_rows
        if self._in_shard >= ROWS_PER_SHARD:
            self._end_shard()

    def _end_shard(self) -> None:
        if self._writer is None:
            return
        self._writer.close()
        path = shard_path(self._data, self._shard)
        seal(path)
        fsync_path(path)
        self._writer, self._in_shard, self._shard = None, 0, self._shard + 1


def write_folder(
    path: Path,
    schema: pa.Schema,
    tables: Iterable[pa.Table],
    facts: Mapping[str, Any],
    card: Callable[[int], str],
) -> int:
    """Write a new folder with rows, a card and SET_FILE.

    Args:
        path: the folder.
        schema: the columns of the rows.
        tables: the rows.
        facts: the content of SET_FILE, to which the number and digest of the rows are added.
        card: makes the text of README.md from the number of rows.

    Returns:
        The number of rows.
    """
    with whole_folder(path) as folder:
        writer = ShardWriter(folder, schema)
        for table in tables:
            writer.add(table)
        writer.close()
        digest = set_digest(whole_shards(FolderStorage(folder), str(path), writer.rows))
        values = {**facts, "rows": writer.rows, "digest": digest}
        texts = {SET_FILE: json.dumps(values, indent=2, ensure_ascii=False)}
        texts["README.md"] = card(writer.rows)
        for name, text in texts.items():
            (folder / name).write_text(text + "\n", encoding="utf-8")
            fsync_path(folder / name)
    return writer.rows
