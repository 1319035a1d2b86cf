"""The files of a folder that go to the hub, and whether they are there already."""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from batchgen.folder.open_folder import open_folder, refuse_incomplete
from batchgen.folder.read_job import JobFolderReader
from batchgen.grades.folder_grades import GRADES
from batchgen.pipelines.record.step_folders import step_folder
from batchgen.publish.finished_rows import SET_FILE, is_set, set_facts
from batchgen.shards.shard_files import shard_files
from batchgen.util.errors import ConfigError
from batchgen.util.paths import folder_here, user_path

CARD = "README.md"
_MANIFEST = "manifest.json"
_BESIDE = ("config.yaml", "rows.json")
_ROWS = "rows"


@dataclass(frozen=True)
class LocalFile:
    """A file as it is to be in the repository: its path there and here."""

    name: str
    source: Path

    @property
    def size(self) -> int:
        return self.source.stat().st_size

    def sha256(self) -> str:
        """The digest by which the hub knows large files."""
        with self.source.open("rb") as file:
            return hashlib.file_digest(file, "sha256").hexdigest()

    def git_blob(self) -> str:
        """The digest by which git knows small files."""
        content = self.source.read_bytes()
        return hashlib.sha1(b"blob %d\0" % len(content) + content).hexdigest()


class PushedFolder:
    """A job's folder, which may still grow, or one that `select` or `export` wrote.

    Attributes:
        identity_file: the file that says what the rows are.
        identity: a digest of that, which stays while a job goes on or grows.
    """

    def __init__(self, given: str) -> None:
        """Raise ConfigError if the folder is neither."""
        self.given = folder_here(given, "batchgen push")
        self._reader: JobFolderReader | None = None
        self.path = Path(step_folder(str(user_path(given, "DIR"))))
        if self.path.is_file():
            raise ConfigError(
                f"push takes folders, and {given} is a file: write a folder with `batchgen export "
                "… --out FOLDER`, whose name has no suffix"
            )
        if is_set(given):
            self.identity_file, self.identity = SET_FILE, str(set_facts(self.path)["request"])
        else:
            self._reader = open_folder(given, "push")
            self.identity_file, self.identity = _MANIFEST, job_identity(self._reader.manifest)

    @property
    def status(self) -> str:
        """The job's status; complete for a set."""
        if self._reader is None:
            return "complete"
        begun = "running" if self._reader.may_run else "stopped"
        return str(self._reader.metrics.get("status", begun))

    def refuse_incomplete(self) -> None:
        """Raise ConfigError for a job that is not complete."""
        if self._reader is not None:
            refuse_incomplete(self._reader, self.given)

    def files(self, *, complete: bool) -> Iterator[LocalFile]:
        """The files as they are now, those of every commit first, then shards in order.

        Args:
            complete: whether the job is complete, and its grades and figures are final.
        """
        beside = () if self._reader is None else _BESIDE
        for name in (CARD, self.identity_file, *beside):
            if (self.path / name).is_file():
                yield LocalFile(name, self.path / name)
        folders = ("data", GRADES) if complete else ("data",)
        for folder in folders:
            if (self.path / folder).is_dir():
                for path in shard_files(self.path / folder).values():
                    yield LocalFile(f"{folder}/{path.name}", path)
        if complete and self._reader is not None and (self.path / _ROWS).is_dir():
            for name in sorted(os.listdir(self.path / _ROWS)):
                if name.endswith(".parquet"):
                    yield LocalFile(f"{_ROWS}/{name}", self.path / _ROWS / name)


def job_identity(manifest: Mapping[str, Any]) -> str:
    """A digest of what decides a job's rows, without what changes while it grows."""
    text = json.dumps([manifest.get("identity"), manifest.get("columns")], sort_keys=True)
    return hashlib.blake2b(text.encode(), digest_size=16).hexdigest()


def identity_in(content: bytes, name: str) -> str | None:
    """The identity that a file of the repository holds; None if it holds none."""
    try:
        found = json.loads(content)
        return job_identity(found) if name == _MANIFEST else str(found["request"])
    except (ValueError, KeyError, TypeError, AttributeError):
        return None
