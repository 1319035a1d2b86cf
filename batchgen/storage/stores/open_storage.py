"""Opens what `output.dir` names."""

from __future__ import annotations

import json
from contextlib import closing
from pathlib import Path
from typing import Any

from batchgen.config.groups.workers_config import WorkersConfig
from batchgen.storage.leases.s3_objects import connect
from batchgen.storage.stores.folder_storage import FolderStorage
from batchgen.storage.stores.job_storage import Storage
from batchgen.storage.stores.object_storage import ObjectStorage
from batchgen.util.paths import is_url


def job_metrics(where: str) -> dict[str, Any] | None:
    """What metrics.json of the job at `output.dir` holds; None if it is not there."""
    with closing(open_storage(where, WorkersConfig())) as storage:
        content = storage.read(storage.path / "metrics.json")
    return None if content is None else json.loads(content)


def open_storage(where: str, config: WorkersConfig) -> Storage:
    """What keeps the files of the job at `output.dir`. Raises ConfigError if a package for its
    store is missing."""
    if is_url(where):
        return ObjectStorage(connect(where), config)
    return FolderStorage(Path(where))
