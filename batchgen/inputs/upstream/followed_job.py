"""A running job whose rows another job reads as they are finished (`dataset.follow`).

`follow_job` (read_jobs.py) makes a `FollowedJob`, and `JobSource` reads it.
"""

from __future__ import annotations

import json
import os
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import pyarrow as pa

from batchgen.config.compose.step_configs import step_configs
from batchgen.config.groups.class_names import is_own
from batchgen.config.groups.job_config import JobConfig, StepConfig
from batchgen.evals.graders.build_steps import post_steps, step_descriptions
from batchgen.evals.graders.grade_rows import StepChain
from batchgen.evals.graders.step import arrow_schema
from batchgen.evals.grades.finished_shards import GradedShards
from batchgen.evals.grades.folder_grades import GRADES
from batchgen.evals.grades.grade_files import STEPS_KEY
from batchgen.inputs.upstream.other_job import OtherJob, read_facts
from batchgen.storage.costs.chain_costs import all_steps
from batchgen.storage.folder.read_job import JobFolderReader
from batchgen.storage.folder.whole_shards import FinishedShard, ends_of
from batchgen.storage.leases.lease_files import DATA
from batchgen.storage.shards.checked_file import CheckedFile, damaged, read_schema
from batchgen.storage.shards.enough import Enough
from batchgen.storage.shards.shard_files import last_row, shard_path
from batchgen.storage.stores.folder_storage import FolderStorage
from batchgen.storage.stores.manifest import SAMPLES, Manifest, runs_of_row
from batchgen.util.errors import ConfigError
from batchgen.util.fingerprint import fingerprint_text


@dataclass(frozen=True)
class Promise:
    """What is known of a job's output before its rows exist.

    Attributes:
        manifest: the manifest that the job will have, without digests of rows.
        schema: the columns of its rows.
        post: the steps that grade its rows.
        is_of_folder: whether this was read from the job's folder; else it was derived from the
            configuration of a job that has not begun.
    """

    manifest: Mapping[str, Any]
    schema: pa.Schema
    post: Sequence[StepConfig]
    is_of_folder: bool = False

    @classmethod
    def of(cls, config: JobConfig, manifest: Manifest, schema: pa.Schema) -> Promise:
        """Return the promise of a job with this configuration and manifest."""
        return cls(asdict(manifest), schema, config.post)

    @classmethod
    def of_folder(cls, reader: JobFolderReader) -> Promise | None:
        """Read a promise from a job's folder. Returns None until the job's first shard is finished.

        Raises:
            ConfigError: a step that grades the job is not one of batchgen's own.
            JobError: a file is damaged.
        """
        path = shard_path(reader.path / DATA, 0)
        if not path.exists():
            return None
        post = step_configs(reader.config.get("post") or [], "post")
        if others := [step.target for step in post if not is_own(step.target)]:
            raise ConfigError(
                f"dataset.follow: {reader.storage.display_name} is graded by {others[0]}, which is "
                "not batchgen's own, so the columns of its grades are not known before it ends: "
                "wait until it is complete and use dataset.follow=false (in a pipeline: after: "
                "complete)"
            )
        return cls(reader.manifest, read_schema(path), post, is_of_folder=True)


class FollowedJob(GradedShards):
    """A job that may still run. Its shards are read in order, each as soon as it is complete.

    Attributes:
        read, text_column: see `OtherJob`.
        by_adapter: whether a row was answered with several adapters, so that its id occurs once for
            each of them.
        grade_schema: the columns of the grades.
        shards: the shards that were read so far.
        is_complete: whether the job is complete and all its shards were read.
        needs_grades: whether a shard is read only when it is graded. Set before the first `learn`.
    """

    follows = True

    def __init__(self, folder: Path, name: str, promise: Promise) -> None:
        """Take the job in a folder, which may not exist yet. Raises ConfigError for an invalid
        manifest or an invalid grading step."""
        super().__init__(FolderStorage(folder), str(folder))
        self.read, self.text_column = read_facts(lambda: promise.manifest, name, self.user_path)
        self.by_adapter = runs_of_row(promise.manifest) > 1
        identity = promise.manifest["identity"]
        try:
            self._rows_per_shard = int(identity["output"]["rows_per_shard"])
            self._samples = int(promise.manifest["growing"][SAMPLES])
        except (KeyError, TypeError, ValueError) as error:
            raise ConfigError(
                f"dataset.path: {folder}/manifest.json is not of batchgen ({error!r})"
            ) from None
        self.schema, self._is_of_folder = promise.schema, promise.is_of_folder
        steps = post_steps(promise.post)
        self.grade_schema = arrow_schema(StepChain(steps).columns)
        self._steps = json.dumps(step_descriptions(promise.post, steps), sort_keys=True).encode()
        self.shards: list[FinishedShard] = []
        self.is_complete = self.needs_grades = False
        self._grade_digests: list[str] = []  # digests of the grades of each shard
        self._seen_version: tuple[int, ...] = ()  # of metrics.json, when it was last read
        self._ended = False

    @property
    def grades_digest(self) -> str:
        """A digest of the grades of all shards so far."""
        return fingerprint_text(*self._grade_digests)

    def _check_grades(self) -> None:
        """Do nothing, because `learn` has checked the grades of each shard."""

    def learn(self) -> bool:
        """Read the next shard if it is ready, and return whether it was. Sets `is_complete` when no
        more shards will come.

        Raises:
            ConfigError: the job has ended without grades of the steps that it names.
            JobError: a file is damaged.
        """
        # Asked before the shards are: if the job had ended by now, all its shards exist.
        is_ended = self._is_ended()
        number = len(self.shards)
        path = shard_path(self.storage.path / DATA, number)
        if not path.exists():
            if is_ended:
                reader = self._reader()
                reader.check()
                self.is_complete = True
                self.read = replace(self.read, costs=all_steps(reader.metrics, self.read.name))
            return False
        grades = self._grades_of(number) if self.needs_grades else ""
        if grades is None:
            if is_ended and self._is_of_folder:  # no process will make them any more
                raise self._unusable("some are missing, or belong to other steps or rows")
            return False
        with CheckedFile(path) as file:
            if not file.schema.equals(self.schema):
                raise damaged(path, "it has other columns than the job's configuration says")
            if not is_ended and not self._is_whole(file, number):
                return False
            shard = FinishedShard(self.total, ends_of(file), file.content_digest())
        self.shards.append(shard)
        self._grade_digests.append(grades)
        return True

    def _is_whole(self, file: CheckedFile, number: int) -> bool:
        """Return whether a shard is final. In a job that is extended, a shard may have fewer rows
        or samples and be replaced later."""
        size = self._rows_per_shard
        if last_row(file) != (number + 1) * size - 1:
            return False
        # The rule by which rows have enough samples (`sampling.until`), if the job has one.
        enough = Enough.of(file.schema.metadata)
        if enough is None:
            return bool(file.metadata.num_rows == size * self._samples)
        return enough == Enough.of(self.schema.metadata)

    def _grades_of(self, number: int) -> str | None:
        """Return a digest of the grades of a shard; None if there are no grades of the shard's
        current content."""
        path = shard_path(self.storage.path / GRADES, number)
        if not path.exists():
            return None
        with CheckedFile(path) as file:
            by_steps = (file.schema.metadata or {}).get(STEPS_KEY) == self._steps
            if not by_steps or not self._is_graded(number, file.schema):
                return None
            return file.content_digest()

    def _is_ended(self) -> bool:
        """Return whether metrics.json says that the job is complete. The file is read again only if
        it has changed since the last call."""
        try:
            stat = os.stat(self.storage.path / "metrics.json")
        except FileNotFoundError:
            return False
        version = (stat.st_ino, stat.st_size, stat.st_mtime_ns)
        if version != self._seen_version:
            self._ended = self._reader().metrics.get("status") == "complete"
            self._seen_version = version
        return self._ended

    def _reader(self) -> JobFolderReader:
        return JobFolderReader(self.storage.path, self.storage)


ReadableJob = OtherJob | FollowedJob
"""The jobs whose rows can be read."""
