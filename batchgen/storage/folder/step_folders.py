"""Finds the folder of a pipeline's step by the step's name: OUT/judge is OUT/judge.7c1e9a02fb."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import closing, contextmanager
from pathlib import Path

from batchgen.config.groups.workers_config import WorkersConfig
from batchgen.storage.folder.pipeline_record import RECORD, STEP_NAME, PipelineRecord
from batchgen.storage.leases.job_files import MANIFEST
from batchgen.storage.stores.job_storage import Storage
from batchgen.storage.stores.open_storage import open_storage
from batchgen.util.errors import ConfigError
from batchgen.util.paths import is_url

_WAIT = 3600.0
"""Seconds to wait for another process that writes the record or an export."""


def step_folder(folder: str) -> str:
    """The folder that a user means by a path or URL (see `user_folder`).

    For OUT/STEP, where OUT is a pipeline's folder, it is the current folder of the step; otherwise
    the path itself.

    Raises:
        ConfigError: the pipeline has no such step, or its folder has a link.
        JobError: pipeline.json is damaged.
    """
    above, slash, name = folder.rpartition("/")
    if not slash:
        above = "."
    if not STEP_NAME.fullmatch(name) or above.endswith("/"):
        return folder
    if not is_url(folder) and Path(folder).exists():
        return folder
    record = find_record(above or "/")
    if record is None:
        return folder
    if (current := record.current.get(name)) is None:
        raise ConfigError(
            f"{folder}: the pipeline has no step {name}: choose among {', '.join(record.current)}"
        )
    return f"{above}{slash}{current}" if slash else current


def find_record(out: str) -> PipelineRecord | None:
    """Read pipeline.json of a folder, given as a path or a URL; None if it has none.

    Raises:
        ConfigError: the folder has a link.
    """
    if not is_url(out):
        if not (Path(out) / RECORD).is_file():
            return None
        refuse_linked(Path(out))
    with closing(open_storage(out, WorkersConfig())) as storage:
        return read_record(storage)


def refuse_linked(out: Path) -> None:
    """Check that a pipeline's folder has no links. Whoever made the folder could lead steps and
    exports to any folder of the user's by a link.

    Raises:
        ConfigError: something in the folder is a link.
    """
    with os.scandir(out) as entries:
        if linked := sorted(entry.name for entry in entries if entry.is_symlink()):
            raise ConfigError(
                f"{out / linked[0]} is a link, which a pipeline's folder may not have: replace "
                "it by what it points to (`cp -rL` copies a folder without its links)"
            )


def read_record(storage: Storage) -> PipelineRecord | None:
    """Read pipeline.json; None if there is none."""
    content = storage.read(storage.path / RECORD)
    file_name = f"{storage.display_name}/{RECORD}"
    return None if content is None else PipelineRecord.parse(content, file_name)


@contextmanager
def locked_record(storage: Storage) -> Iterator[PipelineRecord]:
    """Read pipeline.json, empty if there is none, and keep other processes from changing it or the
    exports within the context.

    Raises:
        ConfigError: another process held the lock for an hour.
    """
    lock = storage.lock(_WAIT)
    try:
        yield read_record(storage) or PipelineRecord()
    finally:
        lock.__exit__()


def is_pipeline(out: str) -> bool:
    """Whether a folder is that of a pipeline rather than that of a job."""
    if not is_url(out) and (Path(out) / MANIFEST).exists():
        return False
    return find_record(out) is not None
