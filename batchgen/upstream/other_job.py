"""A complete job whose rows another job reads: what its shards and its grades hold, and how."""

from __future__ import annotations

import hashlib
import json
from bisect import bisect_right
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from batchgen.dataset.source import ReadJob
from batchgen.folder.job_summary import status_line
from batchgen.folder.read_job import BATCH, JobFolderReader
from batchgen.grades.folder_grades import GRADES
from batchgen.grades.grade_files import ROW_KEYS, SHARD_KEY, STEPS_KEY
from batchgen.leases.lease_files import DATA
from batchgen.shards.checked_file import CheckedFile, DamagedFile, Source, damaged
from batchgen.shards.row_order import KEYS, row_keys
from batchgen.shards.shard_files import shard_files, shard_path
from batchgen.util.errors import ConfigError, JobError
from batchgen.util.fingerprint import fingerprint_text

_MOST_DEPTH = 1000
_TYPES = {
    "row_id": pa.string(),
    "row_index": pa.int64(),
    "sample_index": pa.int32(),
    "finish_reason": pa.string(),
}


@dataclass(frozen=True)
class _Shard:
    """A shard as it was when the job was opened.

    Attributes:
        first: how many answers stand in the shards before it.
        ends: behind which of its answers each of its row groups ends.
        digest: of all that the file holds.
    """

    number: int
    first: int
    ends: tuple[int, ...]
    digest: str


class OtherJob:
    """A complete job. Its answers are counted from 0 over all shards.

    Attributes:
        shown: its folder, as people call it.
        read: what the manifest of a reader keeps of it.
        text_column: the column of generated text.
        schema: the columns of its rows.
        grades: the columns of its grades, without those that every row has; empty without grades.
        num_answers: how many answers there are, samples and errors included.
        fingerprint: another one if any byte of its rows is another one.
    """

    def __init__(self, reader: JobFolderReader, name: str) -> None:
        """Look at the ends of all its files.

        Raises:
            ConfigError: it is not complete, or its manifest.json is not one of batchgen.
            JobError: a file is damaged, or not there.
        """
        self.shown = reader.storage.shown
        self._reader, self._storage = reader, reader.storage
        self._check_complete()
        self.read, self.text_column = self._facts(name)
        self._shards, self.schema = self._look_at_shards()
        self.num_answers = self._shards[-1].first + self._shards[-1].ends[-1]
        self._check_number()
        self.fingerprint = fingerprint_text(*(shard.digest for shard in self._shards))
        self.grades, self._grades_fault = self._look_at_grades()

    def _check_complete(self) -> None:
        status = self._reader.metrics.get("status")
        if status == "complete":
            return
        if status == "running":
            do = f"wait until it is complete (batchgen status {self.shown})"
        elif self._storage.in_place:
            do = f"complete it first: batchgen {self.shown}/config.yaml"
        else:
            do = "run its command again, which completes it"
        line = status_line(self._reader, self.shown)
        raise ConfigError(f"dataset.path: only complete jobs can be read, and {line}: {do}")

    def _facts(self, name: str) -> tuple[ReadJob, str]:
        """What the manifest says that readers need."""
        try:
            manifest = self._reader.manifest
            identity, prints = dict(manifest["identity"]), dict(manifest["fingerprints"])
            prints.pop("dataset", None)  # rows may be added
            digest = fingerprint_text(json.dumps([identity, prints], sort_keys=True))
            depth = dict(identity.get("dataset") or {}).get("depth", 0)
            text = identity["output"]["text_column"]
            if type(text) is str and type(depth) is int and 0 <= depth < _MOST_DEPTH:
                return ReadJob(name, digest, depth + 1), text
            why = "text_column or depth"
        except (KeyError, TypeError, ValueError, RecursionError) as error:
            why = f"{type(error).__name__}: {error}"
        raise ConfigError(f"dataset.path: {self.shown}/manifest.json is not of batchgen ({why})")

    def _look_at_shards(self) -> tuple[list[_Shard], pa.Schema]:
        folder = self._storage.path / DATA
        try:
            names = self._storage.names(folder)
        except FileNotFoundError:
            names = []
        files = shard_files(folder, names)
        if list(files) != list(range(len(files))) or not files:
            raise JobError(
                f"{self.shown}: shards are missing in data/ ({len(files)} are there): run its "
                "command again, which computes what is not there"
            )
        shards, schema, first = list[_Shard](), pa.schema([]), 0
        for number, path in files.items():
            source = self._storage.parquet(path)
            with CheckedFile(source) as file:
                if number == 0:
                    schema = file.schema
                elif not file.schema.equals(schema):
                    raise damaged(source, "it has other columns than the shards before it")
                shards.append(_Shard(number, first, _ends(file), file.content_digest()))
            first += shards[-1].ends[-1]
        for name, kind in {**_TYPES, self.text_column: pa.string()}.items():
            if name not in schema.names or schema.field(name).type != kind:
                raise damaged(self._source(shards[0]), f"it has no column {name} of {kind}")
        return shards, schema

    def _check_number(self) -> None:
        rows = self._reader.metrics.get("rows")
        if rows != self.num_answers:
            raise JobError(
                f"{self.shown}: its shards hold {self.num_answers:,} answers, and metrics.json "
                f"says {rows}: shards are missing or of another job; run its command again"
            )

    def _look_at_grades(self) -> tuple[pa.Schema, str | None]:
        """The columns of the grades, and why they cannot be used, if they cannot."""
        folder = self._storage.path / GRADES
        try:
            names = self._storage.names(folder)
        except (FileNotFoundError, NotADirectoryError):
            names = []
        files = shard_files(folder, names)
        made, schema = set[bytes | None](), pa.schema([])
        try:
            for number, path in files.items():
                with CheckedFile(self._storage.parquet(path)) as file:
                    made.add((file.schema.metadata or {}).get(STEPS_KEY))
                    schema = schema if number else file.schema
        except DamagedFile as error:
            return schema, str(error)
        schema = pa.schema([field for field in schema if field.name not in ROW_KEYS])
        if files and (len(made) > 1 or [*files] != [shard.number for shard in self._shards]):
            return schema, "some shards have no grades, or such of other steps"
        return schema, None

    def check_grades(self) -> str:
        """Make sure that the grades are of these very rows, and return a digest of them.

        Raises:
            ConfigError: some are missing, of other steps or of other rows.
        """
        fault, digests = self._grades_fault, list[str]()
        for shard in () if fault else self._shards:
            path = shard_path(self._storage.path / GRADES, shard.number)
            with CheckedFile(self._storage.parquet(path)) as file:
                digests.append(file.content_digest())
                of = (file.schema.metadata or {}).get(SHARD_KEY, b"")
            rows = shard_path(self._storage.path / DATA, shard.number)
            written, graded = self._storage.modified(rows), self._storage.modified(path)
            # A shard that is older than its grades is the one that they were made of.
            if written is None or graded is None or written > graded:
                if of.decode(errors="replace") != _bytes_digest(self._source(shard)):
                    fault = "some are of other rows, which were computed since"
                    break
        if fault is not None:
            raise ConfigError(
                f"dataset.path: the grades of {self.shown} cannot be used ({fault}): run "
                f"`batchgen grade {self.shown}` first"
            )
        return fingerprint_text(*digests)

    def answers(
        self,
        ordinals: npt.NDArray[np.int64] | range,
        columns: Sequence[str],
        grades: Sequence[str] = (),
    ) -> Iterator[tuple[pa.Table, pa.Table]]:
        """Some columns of some answers, and of their grades, in tables of at most BATCH rows.

        Args:
            ordinals: which answers, ascending.
            columns: names of columns of the rows; the KEYS are read, too.

        Raises:
            JobError: a file is damaged, or another one than when the job was opened.
        """
        wanted = np.asarray(ordinals, np.int64)
        firsts = [shard.first for shard in self._shards]
        at = 0
        while at < len(wanted):
            shard = self._shards[bisect_right(firsts, int(wanted[at])) - 1]
            stop = int(np.searchsorted(wanted, shard.first + shard.ends[-1]))
            yield from self._of_shard(shard, wanted[at:stop] - shard.first, columns, grades)
            at = stop

    def _of_shard(
        self,
        shard: _Shard,
        wanted: npt.NDArray[np.int64],
        columns: Sequence[str],
        grades: Sequence[str],
    ) -> Iterator[tuple[pa.Table, pa.Table]]:
        source = self._source(shard)
        names = [*dict.fromkeys([*columns, *KEYS])]
        with CheckedFile(source) as file:
            if file.content_digest() != shard.digest:
                raise JobError(
                    f"{self.shown} has changed while it was read: run the same command again"
                )
            graded = self._graded(shard, grades)
            first = 0
            for group, end in enumerate(shard.ends):
                start, stop = np.searchsorted(wanted, [first, end])
                if start < stop:
                    yield from _taken(file, group, first, wanted[start:stop], names, graded)
                first = end

    def _graded(self, shard: _Shard, grades: Sequence[str]) -> pa.Table:
        """Some columns of the grades of a shard, with KEYS; without a row if there are none."""
        if not grades:
            return pa.table({})
        source = self._storage.parquet(shard_path(self._storage.path / GRADES, shard.number))
        with CheckedFile(source) as file:
            if lacks := [name for name in (*grades, *KEYS) if name not in file.schema.names]:
                raise damaged(source, f"it has no column {lacks[0]}")
            found = file.read([*dict.fromkeys([*grades, *KEYS])])
        if found.num_rows != shard.ends[-1]:
            raise damaged(source, f"it has {found.num_rows} rows, and its shard {shard.ends[-1]}")
        return found

    def _source(self, shard: _Shard) -> Source:
        return self._storage.parquet(shard_path(self._storage.path / DATA, shard.number))


def _taken(
    file: CheckedFile,
    group: int,
    first: int,
    wanted: npt.NDArray[np.int64],
    names: Sequence[str],
    graded: pa.Table,
) -> Iterator[tuple[pa.Table, pa.Table]]:
    """The wanted answers of a row group, which begins at answer `first` of its shard."""
    at = 0
    for batch in file.batches(BATCH, names, [group]):
        stop = int(np.searchsorted(wanted, first + batch.num_rows))
        if at < stop:
            places = wanted[at:stop]
            rows = pa.Table.from_batches([batch]).take(pa.array(places - first))
            grades = graded.take(pa.array(places)) if graded.num_columns else graded
            if graded.num_columns and (row_keys(grades) != row_keys(rows)).any():
                raise JobError(f"{file.name}: its grades are those of other rows: grade it again")
            yield rows, grades
        first, at = first + batch.num_rows, stop
        if at == len(wanted):
            return


def _ends(file: CheckedFile) -> tuple[int, ...]:
    meta = file.metadata
    sizes = [meta.row_group(group).num_rows for group in range(meta.num_row_groups)]
    return tuple(np.cumsum([0, *sizes]).tolist()[1:] or (0,))


def _bytes_digest(source: Source) -> str:
    """The digest of a file's bytes, as grades keep it."""
    with source.open("rb") if isinstance(source, Path) else source as file:
        digest = hashlib.blake2b(digest_size=16)
        while content := file.read(2**20):
            digest.update(content)
    return digest.hexdigest()
