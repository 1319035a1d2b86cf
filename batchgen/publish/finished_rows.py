"""The rows of a complete job with their grades, or of a set that `select` or `export` wrote."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa

from batchgen.folder.open_folder import open_job
from batchgen.folder.read_job import JobFolderReader
from batchgen.grades.folder_grades import GRADES
from batchgen.grades.grade_files import ROW_KEYS, SHARD_KEY
from batchgen.leases.own_files import refuse_links
from batchgen.publish.visible_columns import VisibleColumns, Wanted
from batchgen.shards.checked_file import CheckedFile, Source
from batchgen.shards.row_order import row_keys
from batchgen.shards.shard_files import shard_files, shard_path
from batchgen.storage.job_storage import FolderStorage, Storage
from batchgen.util.errors import ConfigError, JobError
from batchgen.util.paths import is_url, user_path

SET_FILE = "selection.json"
"""The file of a set that says which jobs its rows came from, and how they were chosen."""
SET_FORMAT = 1
BATCH = 256
"""How many rows are in memory at a time."""


@dataclass(frozen=True)
class FoundRow:
    """A row where it lies; `variables` are what expressions and templates see."""

    shard: int
    place: int  # in its shard, from 0
    variables: Mapping[str, Any]


def row_name(row: FoundRow) -> str:
    """How a message names a row, as far as its id was read."""
    found = row.variables
    name = found.get("row_id", found.get("id"))
    return f"row {row.place} of shard {row.shard}" if name is None else f"row {name!r}"


class FinishedRows:
    """Rows that will not change any more, in their order.

    Attributes:
        given: the folder as the user named it.
        manifest: what a job's manifest.json holds; empty for a set.
        facts: what a set's SET_FILE holds; None for a job.
        config: the configuration by group; of a set, that of its jobs, if they had equal
            prompts, else empty.
    """

    def __init__(
        self, given: str, storage: Storage, config: Mapping[str, Any], text_column: str,
        manifest: Mapping[str, Any], facts: Mapping[str, Any] | None = None,
    ) -> None:  # fmt: skip
        self.given, self.storage, self.path = given, storage, storage.path
        self.config = config
        self.text_column, self.manifest = text_column, manifest
        self.facts = facts
        self._checked: set[int] = set()
        data = shard_files(self.path / "data", self._names("data"))
        if not data:
            raise ConfigError(f"{given} has no rows")
        self.shards = list(data)
        with CheckedFile(storage.parquet(data[self.shards[0]])) as file:
            self.schema = file.schema
        if text_column not in self.schema.names:
            raise ConfigError(f"the rows of {given} have no column {text_column!r} of texts")
        self.grade_schema = self._grades(list(data)) if facts is None else None
        self.columns = VisibleColumns(self.schema, self.grade_schema)

    @property
    def is_set(self) -> bool:
        """Whether the rows are those of a set."""
        return self.facts is not None

    def _names(self, folder: str) -> list[str]:
        try:
            return self.storage.names(self.path / folder)
        except (FileNotFoundError, NotADirectoryError):
            return []

    def _grades(self, shards: Collection[int]) -> pa.Schema | None:
        """The columns of the grades; None if there are none."""
        parts = shard_files(self.path / GRADES, self._names(GRADES))
        if not parts:
            return None
        if missing := [number for number in shards if number not in parts]:
            raise ConfigError(
                f"{len(missing)} of {len(shards)} shards of {self.given} have no grades: run "
                f"`batchgen grade {self.given}` first"
            )
        with CheckedFile(self.storage.parquet(parts[self.shards[0]])) as file:
            fields = [field for field in file.schema if field.name not in ROW_KEYS]
        return pa.schema(fields)

    def group(self, name: str) -> dict[str, Any]:
        """A group of the configuration; empty if there is none."""
        found = self.config.get(name)
        return found if isinstance(found, dict) else {}

    @property
    def metrics(self) -> Mapping[str, Any]:
        """What metrics.json holds; empty for a set."""
        return {} if self.is_set else JobFolderReader(self.path, self.storage).metrics

    @cached_property
    def digest(self) -> str:
        """A digest of all shards and grades, from their checksums."""
        known = hashlib.blake2b(digest_size=16)
        for number in self.shards:
            folders = ("data",) if self.grade_schema is None else ("data", GRADES)
            for folder in folders:
                with CheckedFile(self._file(folder, number)) as file:
                    known.update(f"{folder} {number} {file.digest}\n".encode())
        return known.hexdigest()

    def num_rows(self, shard: int) -> int:
        with CheckedFile(self._file("data", shard)) as file:
            count: int = file.metadata.num_rows
        return count

    def _file(self, folder: str, number: int) -> Source:
        return self.storage.parquet(shard_path(self.path / folder, number))

    def tables(
        self, shard: int, wanted: Wanted, size: int = BATCH
    ) -> Iterator[tuple[pa.RecordBatch, pa.Table]]:
        """The rows of a shard, and the grades beside them, without columns if none are wanted.

        Raises:
            ConfigError: the grades are of other rows than the shard has.
        """
        names = [name for name in self.schema.names if name in wanted.data]
        made = [name for name in self.columns.grades if name in wanted.grades]
        keys = [name for name in ROW_KEYS if made and name not in names]
        grades = self._graded(shard, made) if made else None
        start = 0
        with CheckedFile(self._file("data", shard)) as file:
            read = [*names, *keys] or [self.schema.names[0]]
            for batch in file.batches(size, read):
                found = pa.table({})
                if grades is not None:
                    found = grades.slice(start, batch.num_rows)
                    if not np.array_equal(row_keys(batch), row_keys(found)):
                        raise self._old_grades()
                    found = found.select(made)
                start += batch.num_rows
                yield batch.select(names), found

    def _graded(self, shard: int, names: list[str]) -> pa.Table:
        source = self._file(GRADES, shard)
        with CheckedFile(source) as file:
            there = [*ROW_KEYS[1:], *names]
            if any(name not in file.schema.names for name in there):
                raise self._old_grades()
            if shard not in self._checked:
                made_of = (file.schema.metadata or {}).get(SHARD_KEY, b"").decode()
                if made_of != _bytes_digest(self._file("data", shard)):
                    raise self._old_grades()
                self._checked.add(shard)
            return file.read(there)

    def _old_grades(self) -> ConfigError:
        return ConfigError(
            f"the grades of {self.given} are of other rows or steps: run `batchgen grade "
            f"{self.given}` first"
        )

    def rows(self, wanted: Wanted, shards: Collection[int] | None = None) -> Iterator[FoundRow]:
        """The rows with some columns, in order."""
        variables = self.columns.reader(wanted)
        for shard in self.shards if shards is None else shards:
            place = 0
            for batch, grades in self.tables(shard, wanted):
                made = grades.to_pylist() if grades.num_columns else [{}] * batch.num_rows
                fields = batch.to_pylist() if batch.num_columns else [{}] * batch.num_rows
                for one, graded in zip(fields, made, strict=True):
                    yield FoundRow(shard, place, variables(one, graded))
                    place += 1


def _bytes_digest(source: Source) -> str:
    """The digest of a shard that its grades remember."""
    known = hashlib.blake2b(digest_size=16)
    file = source.open("rb") if isinstance(source, Path) else source
    try:
        while block := file.read(2**20):
            known.update(block)
    finally:
        file.close()
    return known.hexdigest()


def is_set(given: str) -> bool:
    """Whether a folder is one that `select` or `export` wrote."""
    if is_url(given):
        return False
    path = user_path(given, "OUT")
    return (path / SET_FILE).is_file() and not (path / "manifest.json").exists()


def open_rows(given: str) -> FinishedRows:
    """The rows of a complete job or of a set, or a ConfigError that says what to do."""
    if is_set(given):
        return _open_set(given, user_path(given, "OUT"))
    reader = open_job(given)
    refuse_incomplete(reader, given)
    return FinishedRows(given, reader.storage, reader.config, reader.text_column, reader.manifest)


def refuse_incomplete(reader: JobFolderReader, given: str) -> None:
    """Raise ConfigError for a job that is not complete, with the command that completes it."""
    status = reader.metrics.get("status", "stopped")
    if status != "complete":
        raise ConfigError(
            f"the job in {given} is not complete ({status}): the command that started it completes "
            f"it; so does, where it was started, `batchgen {given.rstrip('/')}/config.yaml "
            f"output.dir={given}`"
        )


def set_facts(path: Path) -> dict[str, Any]:
    """What the SET_FILE of a folder holds.

    Raises:
        ConfigError: a file of the folder is a link.
        JobError: SET_FILE is not one of this program.
    """
    refuse_links(path)
    if (path / SET_FILE).is_symlink():
        raise ConfigError(f"{path / SET_FILE} is a link, and the files of a set are not")
    try:
        found: dict[str, Any] = json.loads((path / SET_FILE).read_text(encoding="utf-8"))
        texts = [found["kind"], found["request"], found.get("text_column", "")]
        is_known = found["format"] == SET_FORMAT and all(isinstance(one, str) for one in texts)
        if is_known and all(isinstance(one["path"], str) for one in found["jobs"]):
            return found
        why = f"format {found['format']}"
    except (OSError, ValueError, KeyError, TypeError, RecursionError) as error:
        why = f"{type(error).__name__}: {error}"
    raise JobError(f"{path / SET_FILE} cannot be read ({why}): make the set again")


def _open_set(given: str, path: Path) -> FinishedRows:
    facts = set_facts(path)
    if facts["kind"] != "rows":
        raise ConfigError(
            f"{given} is an export for a trainer ({facts['kind']}): give the job or the set that "
            "it was made of"
        )
    configs = [c if isinstance(c := one.get("config"), dict) else {} for one in facts["jobs"]]
    prompts = [config.get("prompt") for config in configs]
    is_one = configs and all(prompt == prompts[0] for prompt in prompts)
    config = configs[0] if is_one else {}
    return FinishedRows(given, FolderStorage(path), config, facts.get("text_column", ""), {}, facts)
