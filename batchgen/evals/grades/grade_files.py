"""One file of the folder `grades`: the grades of one shard, with the shard and the steps that it
was made from."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from hashlib import blake2b
from pathlib import Path

from batchgen.storage.shards.checked_file import DamagedFile, Source, read_schema
from batchgen.storage.shards.row_order import KEYS

ROW_KEYS = ("row_id", *KEYS)
"""The columns by which grades are matched with rows."""
STEPS_KEY, SHARD_KEY = b"batchgen.steps", b"batchgen.shard"
"""Keys of a part's metadata: the steps and the shard that it was made from."""


@dataclass(frozen=True)
class GradePart:
    """A shard of the job, and the file of its grades, which may not exist yet.

    Attributes:
        shard: the path of the shard.
        path: the path of the grades.
        digest: a digest of the shard's bytes.
    """

    shard: Path
    path: Path
    digest: str

    @property
    def is_of_shard(self) -> bool:
        """Whether the grades exist and belong to the shard as it is now."""
        return made_of(self.path).get(SHARD_KEY) == self.digest.encode()

    def is_made_by(self, steps: str) -> bool:
        """Whether the grades exist, belong to the shard as it is now, and were made by these
        steps."""
        metadata = made_of(self.path)
        return (
            metadata.get(SHARD_KEY) == self.digest.encode()
            and metadata.get(STEPS_KEY) == steps.encode()
        )


def made_of(path: Path) -> Mapping[bytes, bytes]:
    """The metadata of a file of grades; empty if the file does not exist or is damaged."""
    if not path.exists():  # faster than an exception
        return {}
    try:
        return read_schema(path).metadata or {}
    except DamagedFile:
        return {}


def bytes_digest(shard: Source) -> str:
    """The digest of a shard's bytes, which its grades record."""
    digest = blake2b(digest_size=16)
    with shard.open("rb") if isinstance(shard, Path) else shard as file:
        while content := file.read(2**20):
            digest.update(content)
    return digest.hexdigest()
