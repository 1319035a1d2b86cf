"""Opens what `output.dir` names."""

from __future__ import annotations

from pathlib import Path

from batchgen.config.workers import WorkersConfig
from batchgen.output.storage import FolderStorage, Storage


def open_storage(where: str, config: WorkersConfig) -> Storage:
    """What keeps the files of a job.

    Args:
        where: `output.dir`.
        config: how its workers notice each other.
    """
    return FolderStorage(Path(where))
