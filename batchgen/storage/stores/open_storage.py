"""Opens the storage of the folder or URL in `output.dir`."""

from __future__ import annotations

from contextlib import closing
from pathlib import Path
from typing import Any

from batchgen.config.groups.workers_config import WorkersConfig
from batchgen.storage.leases.s3_objects import connect
from batchgen.storage.stores.folder_storage import FolderStorage
from batchgen.storage.stores.job_storage import Storage
from batchgen.storage.stores.metrics_file import read_metrics
from batchgen.storage.stores.object_storage import ObjectStorage
from batchgen.util.paths import is_url


def job_metrics(where: str) -> dict[str, Any] | None:
    """The content of metrics.json of the job at `where`, an `output.dir`; None if there is none.

    Raises:
        JobError: the file is damaged.
    """
    with closing(open_storage(where, WorkersConfig())) as storage:
        return read_metrics(storage)


def open_storage(where: str, config: WorkersConfig) -> Storage:
    """Open the storage of the job at `where`, an `output.dir`.

    Raises:
        ConfigError: a package for its store is missing.
    """
    if is_url(where):
        return ObjectStorage(connect(where), config)
    return FolderStorage(Path(where))
