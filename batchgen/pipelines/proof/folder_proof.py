"""Computes the digests of a finished folder, which lock files state and `rebuild` compares."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path

import pyarrow as pa

from batchgen.evals.grades.folder_grades import GRADES
from batchgen.evals.grades.grade_files import bytes_digest
from batchgen.pipelines.proof.lock_file import StepProof
from batchgen.pipelines.proof.merkle import Digest, root, shard_leaves
from batchgen.storage.folder.read_job import JobFolderReader
from batchgen.storage.shards.checked_file import CheckedFile
from batchgen.storage.shards.shard_files import shard_files
from batchgen.storage.stores.manifest import ROWS, Manifest
from batchgen.util.errors import ConfigError
from batchgen.util.fingerprint import fingerprint_text

MOST_SHARDS = 24
"""The most shards for which a lock names the digest of each; for more it has only the root."""


@dataclass(frozen=True)
class FolderDigests:
    """The digests of all shards of a folder, and of its grades.

    Attributes:
        shard_roots: the Merkle root of the rows of each shard.
        files: digests of the bytes of each shard.
        rows: the number of rows.
        columns: a digest of the names and types of the columns.
        grades: the Merkle root of the grades; None without any.
    """

    shard_roots: list[Digest]
    files: list[str]
    rows: int
    columns: str
    grades: Digest | None

    @property
    def root(self) -> Digest:
        return root(self.shard_roots)


def folder_digests(folder: Path) -> FolderDigests:
    """Compute the digests of a folder's files; every row is read.

    Raises:
        JobError: a file is damaged.
        ConfigError: there are no shards.
    """
    roots, rows = list[Digest](), 0
    files = list(shard_files(folder / "data").values()) if (folder / "data").is_dir() else []
    if not files:
        raise ConfigError(f"{folder}: there are no shards in data/")
    for path in files:
        digests = shard_leaves(path)
        roots.append(root(digests))
        rows += len(digests)
    with CheckedFile(files[0]) as file:
        columns = schema_digest(file.schema)
    return FolderDigests(
        roots, [bytes_digest(path) for path in files], rows, columns, _grades(folder)
    )


def schema_digest(schema: pa.Schema) -> str:
    """A digest of the names and types of columns."""
    return fingerprint_text(*(f"{field.name} {field.type}" for field in schema))


def step_proof(reader: JobFolderReader) -> StepProof:
    """The proof of a complete job for a lock file."""
    manifest = Manifest.parse(
        (reader.path / "manifest.json").read_bytes(), reader.storage.display_name
    )
    file_digests = folder_digests(reader.path)
    digests = manifest.row_digests
    proof = StepProof(
        fingerprints=without_places(manifest.fingerprints),
        columns=file_digests.columns,
        rows=file_digests.rows,
        shards=len(file_digests.files),
        root=file_digests.root.hex(),
        dataset=digests[-1] if digests else None,  # the last one covers all rows
        dataset_rows=manifest.growing.get(ROWS),
        grades=None if file_digests.grades is None else file_digests.grades.hex(),
    )
    if len(file_digests.files) > MOST_SHARDS:
        return proof
    return replace(
        proof, shard_roots=[one.hex() for one in file_digests.shard_roots], files=file_digests.files
    )


def without_places(fingerprints: Mapping[str, str]) -> dict[str, str]:
    """Fingerprints by name, without the paths of the files that row steps have read."""
    cleaned: dict[str, str] = {}
    for name, digest in sorted(fingerprints.items()):
        what, _, location = name.partition(" ")
        key = what if location and what.startswith("rows[") else name
        cleaned[key] = f"{cleaned[key]} {digest}" if key in cleaned else digest
    return cleaned


def _grades(folder: Path) -> Digest | None:
    if not (folder / GRADES).is_dir():
        return None
    paths = shard_files(folder / GRADES).values()
    return root([root(shard_leaves(path)) for path in paths])
