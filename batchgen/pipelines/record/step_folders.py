"""Finds the folder of a step by its name: OUT/judge is OUT/judge.7c1e9a02fb."""

from __future__ import annotations

from contextlib import closing
from pathlib import Path

from batchgen.config.workers_config import WorkersConfig
from batchgen.leases.own_files import MANIFEST
from batchgen.pipelines.record.pipeline_record import RECORD, STEP_NAME, PipelineRecord
from batchgen.storage.job_storage import Storage
from batchgen.storage.open_storage import open_storage
from batchgen.util.errors import ConfigError
from batchgen.util.paths import is_url


def step_folder(folder: str) -> str:
    """The folder that is meant by one of a job, a path or a URL as of `user_folder`: the current
    one of the step that the last name is, in a pipeline's folder, and else the folder itself.

    Raises:
        ConfigError: the pipeline has no such step, or its folder is a link.
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
    if (found := record.current.get(name)) is None:
        raise ConfigError(
            f"{folder}: the pipeline has no step {name}: choose among {', '.join(record.current)}"
        )
    place = f"{above}{slash}{found}" if slash else found
    if not is_url(place) and Path(place).is_symlink():
        raise ConfigError(f"{place} is a link, and the folders of a pipeline's steps are not")
    return place


def find_record(out: str) -> PipelineRecord | None:
    """What pipeline.json in a folder says, a path or a URL; None if it has none."""
    if not is_url(out) and not (Path(out) / RECORD).is_file():
        return None
    with closing(open_storage(out, WorkersConfig())) as storage:
        return read_record(storage)


def read_record(storage: Storage) -> PipelineRecord | None:
    """What pipeline.json says; None if there is none."""
    content = storage.read(storage.path / RECORD)
    shown = f"{storage.shown}/{RECORD}"
    return None if content is None else PipelineRecord.parse(content, shown)


def is_pipeline(out: str) -> bool:
    """Whether a folder is that of a pipeline, and not of a job."""
    if not is_url(out) and (Path(out) / MANIFEST).exists():
        return False
    return find_record(out) is not None
