"""Reads a job's folder at any time: while the job runs, after it was killed, or when it is
complete.

Everything that reads rows or figures of a job uses `JobFolderReader`; `open_folder.py` opens it.
"""

from __future__ import annotations

import errno
import re
import socket
from collections.abc import Iterator, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.compute as pc

from batchgen.config.groups.class_names import with_short_names
from batchgen.storage.folder.read_shard import BATCH, ReadShard, may_live
from batchgen.storage.folder.row_funnel import IndexFacts, num_questions
from batchgen.storage.folder.whole_shards import (
    WholeShards,
    check_job,
    check_job_columns,
    whole_shards,
)
from batchgen.storage.leases.job_files import LOCK, ROW_INDEX, refuse_links
from batchgen.storage.leases.lease_files import DATA, JOURNAL, WORKERS, parse_worker
from batchgen.storage.leases.process_identity import started
from batchgen.storage.shards.checked_file import read_schema
from batchgen.storage.shards.journal import journal_files, read_file
from batchgen.storage.shards.row_order import KEYS
from batchgen.storage.shards.shard_files import shard_files, shard_path
from batchgen.storage.stores.folder_storage import FolderStorage, names_in
from batchgen.storage.stores.job_storage import Storage
from batchgen.storage.stores.manifest import Manifest
from batchgen.storage.stores.metrics_file import read_metrics
from batchgen.util.errors import ConfigError, JobError
from batchgen.util.shorten import some_names
from batchgen.util.text.plain_yaml import load_yaml

_OWNER = re.compile(r"pid ([0-9]{1,9}) on (.*), since ")
"""The text of the lock file of a job on this machine."""


class JobFolderReader:
    """Reads a job's folder without changing or locking it.

    Finished rows are in published shards, or in journals until their shard is complete. If a row is
    in both, the copy that was written last counts. The result is the same if a running job
    publishes a shard during a read. Methods that read rows raise ConfigError for unknown columns
    and JobError for damaged files.

    Attributes:
        path: the folder.
        storage: reads its files.
    """

    def __init__(self, path: Path, storage: Storage | None = None) -> None:
        """Open a folder.

        Raises:
            ConfigError: it is not a job's folder, or has links instead of files.
        """
        self.path = path
        self.storage = FolderStorage(path) if storage is None else storage
        if self.storage.in_place and path.is_dir():
            refuse_links(path)
        if self.storage.in_place and path.is_file():
            raise ConfigError(
                f"{self.storage.display_name} is a file, and not the output of a job: give a job's "
                "output.dir"
            )
        content = self.storage.read(path / "manifest.json")
        if content is None:
            is_there = self.storage.exists(path)
            what = "has no manifest.json" if is_there else "does not exist"
            raise ConfigError(
                f"{self.storage.display_name} is not the output of a job ({what}): give a "
                "job's output.dir"
            )
        self._whole: WholeShards | None = None

    def check(self) -> None:
        """Check that a job whose metrics.json says complete has all its rows, see `check_job`.

        Raises:
            JobError: rows are missing.
        """
        manifest = self.manifest  # first, because a job that grows changes its metrics first
        display_name, metrics, facts = self.storage.display_name, self.metrics, self.row_facts
        self._whole = check_job(self.storage, display_name, manifest, metrics, facts)

    @property
    def whole(self) -> WholeShards:
        """The shards of a complete job.

        Raises:
            ConfigError, JobError: as in `whole_shards`.
        """
        if self._whole is None:
            display_name = self.storage.display_name
            self._whole = whole_shards(self.storage, display_name, self.metrics.get("rows"))
            check_job_columns(self.storage, self._whole.schema, self.text_column)
        return self._whole

    @property
    def config(self) -> dict[str, Any]:
        """The configuration by group, as in config.yaml, with short names of classes; empty if the
        job was killed before it was written."""
        content = self.storage.read(self.path / "config.yaml")
        if content is None:
            return {}
        config = load_yaml(content, f"{self.storage.display_name}/config.yaml")
        return with_short_names(config) if isinstance(config, dict) else config

    @property
    def manifest(self) -> dict[str, Any]:
        """The content of manifest.json."""
        return asdict(self._manifest())

    def _manifest(self) -> Manifest:
        path = self.path / "manifest.json"
        content = self.storage.read(path)
        if content is None:
            raise FileNotFoundError(errno.ENOENT, "the job is gone", str(path))
        return Manifest.parse(content, str(path))

    @property
    def questions(self) -> int | None:
        """The number of input rows of the job, after its row steps; None if it is not known yet."""
        return num_questions(self._manifest(), self.row_facts)

    @property
    def row_facts(self) -> IndexFacts | None:
        """The content of rows.json; None if the job has no row steps."""
        return IndexFacts.parse(self.storage.read(self.path / ROW_INDEX))

    @property
    def text_column(self) -> str:
        """The name of the column of generated text."""
        name: str = self.manifest["identity"]["output"]["text_column"]
        return name

    @property
    def metrics(self) -> dict[str, Any]:
        """The content of metrics.json; empty if the job was killed before it was written.

        In the file, a killed job still has the status `running`. Here its status is `killed`, if it
        ran on this machine. The counts may be up to ten seconds old.
        """
        metrics = read_metrics(self.storage) or {}
        if metrics.get("status") == "running" and not self.may_run:
            metrics["status"] = "killed"
            for last in metrics.get("attempts", [])[-1:]:
                last["status"] = "killed"
        return metrics

    @property
    def schema(self) -> pa.Schema | None:
        """The columns of the rows, None if no row is finished."""
        # Journals are read first, so that a shard which is published meanwhile is found as a shard.
        for files in self._journals().values():
            for path in files:
                for batch in self._read_if_there(path) or ():
                    return batch.schema
        for path in self._published().values():
            return read_schema(self.storage.parquet(path))
        return None

    def rows(self, columns: Sequence[str] | None = None) -> Iterator[dict[str, Any]]:
        """Yield the finished rows in the order of the data set, with some columns or all."""
        for batch in self.batches(columns):
            yield from batch.to_pylist()

    def batches(
        self, columns: Sequence[str] | None = None, size: int = BATCH
    ) -> Iterator[pa.RecordBatch]:
        """Yield the finished rows in batches of about `size` rows; memory does not grow."""
        schema = self.fields(columns)
        if schema is None:
            return
        for number in self.shards():
            yield from self.shard(number).batches(schema.names, size=size)

    def fields(self, columns: Sequence[str] | None = None) -> pa.Schema | None:
        """The schema of some columns, or of all if `columns` is None. None if no row is
        finished."""
        schema = self.schema
        if schema is None or columns is None:
            return schema
        if unknown := [name for name in columns if name not in schema.names]:
            raise ConfigError(
                f"the rows of {self.storage.display_name} have no column {unknown[0]!r}: choose "
                f"among {some_names(schema.names, unknown[0])}"
            )
        return pa.schema([schema.field(name) for name in columns])

    def find(self, row_id: str) -> Iterator[dict[str, Any]]:
        """Yield all finished samples of the row with this id."""
        schema = self.schema
        if schema is None:
            return
        for number in self.shards():
            ids = self.shard(number).batches(["row_id"])
            if any(pc.any(pc.equal(batch["row_id"], row_id)).as_py() for batch in ids):
                for batch in self.shard(number).batches(schema.names):
                    yield from batch.filter(pc.equal(batch["row_id"], row_id)).to_pylist()

    def _journals(self) -> dict[int, list[Path]]:
        return journal_files(self.path / JOURNAL, names_in(self.storage, JOURNAL))

    def _published(self) -> dict[int, Path]:
        return shard_files(self.path / DATA, names_in(self.storage, DATA))

    def _read_if_there(self, path: Path) -> list[pa.RecordBatch] | None:
        """Read the whole batches of a journal file; None if the file was deleted."""
        try:
            self.storage.download(path)
            return list(read_file(path))
        except FileNotFoundError:
            return None

    def shards(self) -> list[int]:
        """The numbers of the shards that have finished rows."""
        # Journals are listed first, so that a shard which is published meanwhile is not missed.
        numbers = set(self._journals())
        return sorted(numbers | set(self._published()))

    @property
    def end(self) -> int:
        """One more than the `row_index` of the last finished row; 0 if none is finished."""
        for number in reversed(self.shards()):
            batches = self.shard(number).batches(KEYS)
            ends: list[int] = [1 + pc.max(batch["row_index"]).as_py() for batch in batches]
            if ends:
                return max(ends)
        return 0

    def shard(self, number: int) -> ReadShard:
        """The rows of a shard as they are now.

        The journal files of a shard are deleted after the shard is published. So if a journal file
        disappears during the read, everything is read again.
        """
        while True:
            journaled: list[pa.RecordBatch] | None = []
            journals = self._journals().get(number, ())
            for path in journals:
                batches = self._read_if_there(path)
                journaled = None if batches is None or journaled is None else [*journaled, *batches]
            if journaled is not None:
                path = shard_path(self.path / DATA, number)
                is_there = self.storage.exists(path)
                # A journal without rows is no error: it was begun when the disk was full.
                if not is_there and not journals:
                    raise JobError(f"{path} is gone, and the folder has no other copy of its rows")
                return ReadShard(self.storage.parquet(path) if is_there else None, journaled)

    @property
    def may_run(self) -> bool:
        """Whether a worker of the job, or the last process that held its lock, may still be
        running."""
        beats = (name for name in names_in(self.storage, WORKERS) if parse_worker(name) is not None)
        if any(may_live(self.storage.read(self.path / WORKERS / name)) for name in beats):
            return True
        content = self.storage.read(self.path / LOCK)
        owner = None if content is None else _OWNER.match(content.decode(errors="replace"))
        if owner is None:
            return False
        pid, host = owner.groups()
        return host != socket.gethostname() or started(int(pid)) is not None
