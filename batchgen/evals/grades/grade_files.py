"""One file of the folder `grades`: the grades of one shard, with the shard and the steps it came
from."""

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
"""Keys of a part's metadata: the steps and the shard from which it was made."""


@dataclass(frozen=True)
class GradePart:
    """A shard of the job and where its grades are, or will be.

    Attributes:
        digest: a digest of the shard's bytes.
    """

    shard: Path
    path: Path
    digest: str

    @property
    def is_of_shard(self) -> bool:
        """Whether the grades are there, and of this very shard."""
        return made_of(self.path).get(SHARD_KEY) == self.digest.encode()

    def is_made_by(self, steps: str) -> bool:
        """Whether the grades are there, of this very shard and by these steps."""
        metadata = made_of(self.path)
        return (
            metadata.get(SHARD_KEY) == self.digest.encode()
            and metadata.get(STEPS_KEY) == steps.encode()
        )


def made_of(path: Path) -> Mapping[bytes, bytes]:
    """The metadata of the grades in a file; empty if they are not there or damaged."""
    if not path.exists():  # which takes less time than an error
        return {}
    try:
        return read_schema(path).metadata or {}
    except DamagedFile:
        return {}


def bytes_digest(shard: Source) -> str:
    """The digest of a shard's bytes, which its grades remember."""
    known = blake2b(digest_size=16)
    with shard.open("rb") if isinstance(shard, Path) else shard as file:
        while content := file.read(2**20):
            known.update(content)
    return known.hexdigest()
