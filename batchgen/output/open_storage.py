"""Opens what `output.dir` names."""

from __future__ import annotations

from pathlib import Path

from batchgen.config.workers import WorkersConfig
from batchgen.output.object_storage import ObjectStorage
from batchgen.output.storage import FolderStorage, Storage
from batchgen.paths import is_url
from batchgen.workers.object_store import connect


def open_storage(where: str, config: WorkersConfig) -> Storage:
    """What keeps the files of a job.

    Args:
        where: `output.dir`.
        config: how its workers notice each other.

    Raises:
        ConfigError: what an object store needs is not installed.
    """
    if is_url(where):
        return ObjectStorage(connect(where), config)
    return FolderStorage(Path(where))
