"""Lists the files of a folder that `batchgen push` uploads, and compares the folder with what a
repository holds."""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from batchgen.evals.grades.folder_grades import GRADES
from batchgen.pipelines.publish.finished_rows import SET_FILE, is_set, set_facts, whole_set
from batchgen.storage.folder.open_folder import open_folder, refuse_incomplete
from batchgen.storage.folder.read_job import JobFolderReader
from batchgen.storage.folder.refused_folder import written_manifest
from batchgen.storage.folder.step_folders import step_folder
from batchgen.storage.leases.job_files import MANIFEST, ROW_INDEX, ROWS
from batchgen.storage.leases.lease_files import DATA
from batchgen.storage.shards.checked_file import CheckedFile
from batchgen.storage.shards.shard_files import shard_files
from batchgen.storage.stores.manifest import Manifest
from batchgen.util.errors import ConfigError
from batchgen.util.paths import folder_here, user_path

CARD = "README.md"
_BESIDE = ("config.yaml", ROW_INDEX)


@dataclass(frozen=True)
class LocalFile:
    """A file to push.

    Attributes:
        name: its path in the repository.
        source: its path on this machine.
    """

    name: str
    source: Path

    @property
    def size(self) -> int:
        return self.source.stat().st_size

    def sha256(self) -> str:
        """Return the digest by which the hub identifies large files."""
        with self.source.open("rb") as file:
            return hashlib.file_digest(file, "sha256").hexdigest()

    def git_blob(self) -> str:
        """Return the digest by which git identifies small files."""
        content = self.source.read_bytes()
        return hashlib.sha1(b"blob %d\0" % len(content) + content).hexdigest()

    def check(self) -> None:
        """Raise JobError if the file is a damaged Parquet file."""
        if self.source.suffix == ".parquet":
            with CheckedFile(self.source) as file:
                file.verify()


class PushedFolder:
    """A folder to push: a job's, which may still grow, or a set's, which `select` or `export`
    wrote.

    Attributes:
        path: the folder.
        identity_file: the file that identifies the rows: a job's manifest, or SET_FILE.
    """

    def __init__(self, job_path: str) -> None:
        """Open the folder. Raises ConfigError if it is neither a job's nor a set's, JobError if
        rows are missing."""
        self.user_path = folder_here(job_path, "batchgen push")
        self._reader: JobFolderReader | None = None
        self.path = Path(step_folder(str(user_path(job_path, "DIR"))))
        if self.path.is_file():
            raise ConfigError(
                f"push takes folders, and {job_path} is a file: write a folder with `batchgen "
                "export … --out FOLDER`, whose name has no suffix"
            )
        if is_set(job_path):
            self.identity_file = SET_FILE
            whole_set(self.path, job_path)
        else:
            self.identity_file = MANIFEST
            self._reader = open_folder(job_path, "push")

    @property
    def status(self) -> str:
        """The status of the job; `complete` for a set."""
        if self._reader is None:
            return "complete"
        begun = "running" if self._reader.may_run else "stopped"
        return str(self._reader.metrics.get("status", begun))

    def refuse_incomplete(self) -> None:
        """Raise ConfigError for a job that is not complete."""
        if self._reader is not None:
            refuse_incomplete(self._reader, self.user_path)

    def files(self, *, complete: bool) -> Iterator[LocalFile]:
        """Yield the files as they are now: first those that describe the rows, then the shards in
        order.

        Args:
            complete: whether the job is complete, so that its grades and row index are pushed too.

        Raises:
            JobError: rows of a complete job are missing.
        """
        if complete and self._reader is not None:
            self._reader.check()
        extras = () if self._reader is None else _BESIDE
        for name in (CARD, self.identity_file, *extras):
            if (self.path / name).is_file():
                yield LocalFile(name, self.path / name)
        folders = ("data", GRADES) if complete else ("data",)
        for folder in folders:
            if (self.path / folder).is_dir():
                for path in shard_files(self.path / folder).values():
                    yield LocalFile(f"{folder}/{path.name}", path)
        if complete and self._reader is not None and (self.path / ROWS).is_dir():
            for name in sorted(os.listdir(self.path / ROWS)):
                if name.endswith(".parquet"):
                    yield LocalFile(f"{ROWS}/{name}", self.path / ROWS / name)

    def differences(self, there: bytes) -> list[str]:
        """Compare the rows with those that a repository holds. Returns a line for each difference;
        none if the rows are equal, or if the folder's rows continue the repository's.

        Args:
            there: the content of the repository's identity file.
        """
        try:
            if self._reader is None:
                here, other = set_facts(self.path), json.loads(there)
                keys = [key for key in ("request", "digest") if here.get(key) != other.get(key)]
                return [f"{key}: {other.get(key)} → {here.get(key)}" for key in keys]
            manifest = written_manifest(self._reader.storage)
            assert manifest is not None
            return Manifest.parse(there, self.identity_file).differences(manifest, manifest.digests)
        except (ValueError, AttributeError):  # a ConfigError is a ValueError
            return [f"its {self.identity_file} is not one of batchgen"]

    @staticmethod
    def has_rows(name: str) -> bool:
        """Whether a file of a repository holds rows, grades or the row index."""
        folder, _, file = name.partition("/")
        return folder in (DATA, GRADES, ROWS) and file.endswith(".parquet")
