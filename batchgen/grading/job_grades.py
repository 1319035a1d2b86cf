"""The folder `grades` of a job: what `post` steps make of its rows, a Parquet file per shard."""

from __future__ import annotations

import hashlib
import itertools
import json
import os
from collections import deque
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq

from batchgen.command.row_json import json_readers
from batchgen.config import ScoreConfig, StepConfig
from batchgen.errors import ConfigError
from batchgen.grading.build_steps import check_fields, described, post_steps
from batchgen.grading.rows import Grader, StepChain
from batchgen.grading.step import arrow_schema
from batchgen.output.fsync import fsync_path
from batchgen.output.manifest import write_atomic
from batchgen.output.row_order import KEYS
from batchgen.output.shards import damaged, publish_shard, shard_files, shard_path, unwritable

GRADES = "grades"
_STEPS = "steps.json"
_KEYS = ("row_id", *KEYS)
"""The columns by which grades and rows belong together."""
_STEPS_KEY, _SHARD_KEY = b"batchgen.steps", b"batchgen.shard"
"""Metadata of a part: by which steps it was made, and of which shard."""
_BATCH = 512


@dataclass(frozen=True)
class Part:
    """A shard of the job and where its grades are, or will be.

    Attributes:
        digest: of the shard's bytes.
    """

    shard: Path
    path: Path
    digest: str

    @property
    def is_of_shard(self) -> bool:
        """Whether the grades are there, and of this very shard."""
        return self._made.get(_SHARD_KEY) == self.digest.encode()

    def is_made_by(self, steps: str) -> bool:
        """Whether the grades are there, of this very shard and by these steps."""
        return self.is_of_shard and self._made.get(_STEPS_KEY) == steps.encode()

    @property
    def _made(self) -> Mapping[bytes, bytes]:
        """The metadata of the grades."""
        try:
            return pq.read_schema(self.path).metadata or {}
        except (FileNotFoundError, pa.ArrowInvalid):
            return {}


class JobGrades:
    """The grades of one job.

    A part says of which shard and by which steps it was made. Parts that are as they should be
    stay; so grading goes on where it was killed, and what a job computed anew is graded anew.
    """

    def __init__(self, job: Path) -> None:
        self.job, self.path = job, job / GRADES

    @property
    def steps(self) -> list[dict[str, Any]] | None:
        """The steps of the grades with their options and versions; None if there are no grades."""
        path = self.path / _STEPS
        if not path.is_file():
            return None
        found: list[dict[str, Any]] = json.loads(path.read_text(encoding="utf-8"))["steps"]
        return found

    def parts(self, shards: Collection[int] | None = None) -> Iterator[Part]:
        """A part for each shard of the job, or for those of these numbers, in order."""
        found = shard_files(self.job / "data")
        return map(self.part, (n for n in found if shards is None or n in shards))

    def part(self, number: int) -> Part:
        """The part of the shard with this number, which is there."""
        shard = shard_path(self.job / "data", number)
        with shard.open("rb") as file:
            digest = hashlib.file_digest(file, lambda: hashlib.blake2b(digest_size=16))
        return Part(shard, shard_path(self.path, number), digest.hexdigest())

    def finished(self) -> list[Part]:
        """The parts, once all are there.

        Raises:
            ConfigError: there are no grades, or some are missing, of other steps or of other rows.
        """
        steps = self.steps
        if steps is None:
            raise ConfigError(
                f"{self.job} has no grades: `batchgen grade {self.job} post=…` makes them"
            )
        parts = list(self.parts())
        missing = sum(not part.is_made_by(_text(steps)) for part in parts)
        if missing:
            raise ConfigError(
                f"{missing} of {len(parts)} shards of {self.job} have no grades, or such of other "
                f"rows or steps: run `batchgen grade {self.job}` first"
            )
        return parts

    def lie_beside(self) -> bool:
        """Whether every shard has a part of the same length, all by the steps of `steps`.

        Only the ends of the files are read, so a shard that was computed again is not noticed:
        `finished` reads all of them.
        """
        steps = self.steps
        if steps is None:
            return False
        for number, shard in shard_files(self.job / "data").items():
            try:
                found = pq.read_metadata(shard_path(self.path, number))
            except (FileNotFoundError, pa.ArrowInvalid):
                return False
            made = (found.metadata or {}).get(_STEPS_KEY)
            if made != _text(steps).encode() or found.num_rows != pq.read_metadata(shard).num_rows:
                return False
        return True

    def make(
        self,
        configs: Sequence[StepConfig],
        text_column: str,
        config: ScoreConfig,
        *,
        shards: Collection[int] | None = None,
        stop: Callable[[], bool] = lambda: False,
    ) -> int | None:
        """Grade all rows that have no such grades yet.

        Args:
            configs: the steps.
            text_column: the column of generated text.
            config: how many processes run steps that need them, and for how long at most.
            shards: the numbers of the shards to grade; None for all.
            stop: whether to leave off; it is asked after every row.

        Returns:
            How many rows were graded; None if it was stopped.

        Raises:
            ConfigError: a step is wrong, or reads a column that the rows do not have.
            JobError: a shard is damaged, or the grades cannot be written.
        """
        steps = post_steps(configs)
        _check_names(StepChain(steps))
        made = described(configs, steps)
        pending = [part for part in self.parts(shards) if not part.is_made_by(_text(made))]
        if not pending and self.steps == made:
            return 0
        if pending:
            check_fields(steps, pq.read_schema(pending[0].shard).names)
        try:
            self.path.mkdir(exist_ok=True)
        except OSError as error:
            raise unwritable(self.path, error) from error
        if self.steps != made:
            write_atomic(self.path / _STEPS, json.dumps({"steps": made}, indent=2) + "\n")
        count = config.workers or len(os.sched_getaffinity(0))
        with Grader(steps, workers=count, seconds=config.seconds) as grader:
            return _Run(grader, _text(made), text_column, stop).grade(pending)

    def schema(self) -> pa.Schema | None:
        """The columns of the grades; None if there are none."""
        files = shard_files(self.path).values() if self.path.is_dir() else ()
        return next((pq.read_schema(path) for path in files), None)


class _Stopped(Exception):
    """Raised between two rows when grading is to be left off."""


@dataclass(frozen=True)
class _Run:
    """One pass over the shards that have no grades."""

    grader: Grader
    steps: str
    text_column: str
    stop: Callable[[], bool]

    def grade(self, parts: Sequence[Part]) -> int | None:
        """Write the parts one after the other; None if it was stopped."""
        keys: deque[tuple[Part, Mapping[str, Any]]] = deque()  # rows the grader has not given back

        def rows() -> Iterator[tuple[str | None, Mapping[str, Any]]]:
            for part in parts:
                for row in self._read(part.shard):
                    keys.append((part, {name: row[name] for name in _KEYS}))
                    yield row[self.text_column], row

        def graded() -> Iterator[tuple[Part, dict[str, Any]]]:
            for values in self.grader.grade(rows()):
                if self.stop():
                    raise _Stopped
                part, key = keys.popleft()
                yield part, {**key, **values}

        count = 0
        try:
            for part, found in itertools.groupby(graded(), key=lambda pair: pair[0]):
                count += self._write(part, (values for _, values in found))
        except _Stopped:
            return None
        return count

    def _read(self, shard: Path) -> Iterator[dict[str, Any]]:
        try:
            with pq.ParquetFile(shard, page_checksum_verification=True) as file:
                names = self._columns(file.schema_arrow)
                readers = json_readers(pa.schema([file.schema_arrow.field(n) for n in names]))
                for batch in file.iter_batches(_BATCH, columns=names):
                    for row in batch.to_pylist():
                        for name, read in readers.items():
                            row[name] = read(row[name])
                        yield row
        except (pa.ArrowException, OSError) as error:
            raise damaged(shard, str(error)) from error

    def _columns(self, schema: pa.Schema) -> list[str]:
        """The columns that the steps read: those of the data set lie before the text."""
        given = schema.names[len(_KEYS) : schema.names.index(self.text_column)]
        steps = self.grader.chain.steps
        if all(step.field_names is not None for step in steps):
            wanted = {name for step in steps for name in step.field_names or ()}
            given = [name for name in schema.names if name in wanted and name not in _KEYS]
        return list(dict.fromkeys([*_KEYS, *given, self.text_column]))

    def _write(self, part: Part, rows: Iterator[dict[str, Any]]) -> int:
        """Write the grades of one shard; returns their number."""
        temporary = part.path.with_name(f".{part.path.name}.tmp")
        count = 0
        try:
            with pq.ParquetWriter(temporary, self._schema(part), compression="zstd") as writer:
                while batch := list(itertools.islice(rows, _BATCH)):
                    writer.write_batch(pa.RecordBatch.from_pylist(batch, schema=writer.schema))
                    count += len(batch)
            fsync_path(temporary)
        except OSError as error:
            raise unwritable(part.path, error) from error
        publish_shard(temporary, part.path)
        return count

    def _schema(self, part: Part) -> pa.Schema:
        rows = pq.read_schema(part.shard)
        fields = [rows.field(name) for name in _KEYS]
        made = {_STEPS_KEY: self.steps, _SHARD_KEY: part.digest}
        return pa.schema([*fields, *self._made], metadata=made)

    @cached_property
    def _made(self) -> pa.Schema:
        return arrow_schema(self.grader.chain.columns)


def _text(steps: Sequence[Mapping[str, Any]]) -> str:
    return json.dumps(steps, sort_keys=True)


def _check_names(chain: StepChain) -> None:
    for column in chain.columns:
        if column.name in _KEYS:
            raise ConfigError(
                f"post: a step writes {column.name!r}, which every row has: rename it"
            )
