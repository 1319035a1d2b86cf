"""Makes the lock file of a job, of a chain of jobs or of a pipeline, for `batchgen lock`."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from copy import deepcopy
from pathlib import Path
from typing import Any

from batchgen.config.compose.compose_config import compose_groups
from batchgen.config.compose.load_config import load_config, resolved
from batchgen.config.compose.trust import TYPED
from batchgen.config.groups.convert_value import build
from batchgen.config.groups.dataset_config import DatasetConfig
from batchgen.inputs.upstream.other_job import OtherJob
from batchgen.inputs.upstream.read_jobs import read_jobs
from batchgen.pipelines.proof.folder_proof import step_proof
from batchgen.pipelines.proof.lock_file import LockFile, StepProof
from batchgen.pipelines.run.pipeline_values import FROM
from batchgen.pipelines.trace.source_places import places_beside
from batchgen.storage.folder.open_folder import open_folder, refuse_incomplete
from batchgen.storage.folder.pipeline_record import STEP_NAME, step_of
from batchgen.storage.folder.read_job import JobFolderReader
from batchgen.storage.folder.step_folders import find_record, is_pipeline
from batchgen.storage.stores.manifest import READ_JOB
from batchgen.util.errors import ConfigError
from batchgen.util.paths import folder_here, user_path

_GROUPS = (
    *("model", "dataset", "rows", "prompt", "sampling", "strategy", "constraint", "engine"),
    *("post", "score", "output"),
)
"""The groups of the configuration that a lock keeps. The others decide how a job runs, but not what
it writes."""
_NOT_KEPT = {
    "dataset": {"follow"},
    "output": {"dir", "overwrite", "retry_errors", "on_all_errors", "report", "reuse"},
}
"""The keys of those groups that a lock leaves out, for the same reason."""
_PATH = "path"


def make_lock(job_path: str) -> LockFile:
    """Make the lock of a folder, including all jobs whose rows it reads, directly or through other
    jobs.

    Raises:
        ConfigError: a job is not complete, or a job whose rows were read is missing or has changed.
        JobError: a file is damaged.
    """
    out = folder_here(job_path, "batchgen lock")
    chain = _Chain()
    if is_pipeline(out):
        record = find_record(str(user_path(out, "OUT")))
        assert record is not None
        for folder in record.current.values():
            chain.add(f"{out.rstrip('/')}/{folder}")
    else:
        chain.add(out)
    return LockFile(chain.steps, chain.proof, chain.versions)


class _Chain:
    """Collects jobs for a lock, each after the jobs whose rows it reads."""

    def __init__(self) -> None:
        self.steps: dict[str, dict[str, Any]] = {}
        self.proof: dict[str, StepProof] = {}
        self.versions: dict[str, str] = {}
        self._names: dict[Path, str] = {}

    def add(self, user_path: str) -> str:
        """Add a job, after the jobs that it reads, and return its name in the lock."""
        reader = open_folder(user_path, "lock")
        path = reader.path.resolve()
        if path in self._names:
            return self._names[path]
        refuse_incomplete(reader, user_path)
        groups = reader.config
        parents = [self.add(str(job.storage.path)) for job in _read(reader, groups, user_path)]
        tables = {index: self.add(table) for index, table in _tables(groups).items()}
        name = self._names[path] = self._name(path, several=len(parents) > 1)
        self.steps[name] = lock_step(groups, parents, tables)
        self.proof[name] = step_proof(reader)
        self.versions |= dict(reader.manifest["versions"])
        return name

    def _name(self, path: Path, *, several: bool) -> str:
        """Return a new name for a job in the lock, made from its folder's name."""
        name = step_of(path.name) or re.sub(r"[^A-Za-z0-9_-]", "_", path.name)
        if not STEP_NAME.fullmatch(name):
            name = f"job_{name}"[:40]
        while name in self.steps:
            name += "_"
        return name


def _read(reader: JobFolderReader, groups: Mapping[str, Any], user_path: str) -> list[OtherJob]:
    """Return the jobs that are the data set of a job.

    Raises:
        ConfigError: a job has other rows than those that the manifest says were read.
    """
    dataset = groups.get("dataset") or {}
    if dataset.get("kind") != "job":
        return []
    jobs = read_jobs(
        places_beside(build(DatasetConfig, dict(dataset), "dataset").paths, reader.path), None
    )
    fingerprints = reader.manifest["fingerprints"]
    for job in jobs:
        key = f"{READ_JOB} {job.read.name}" if len(jobs) > 1 else READ_JOB
        if fingerprints.get(key) != job.read.digest:
            raise ConfigError(
                f"{user_path}: {job.user_path} is not the job whose rows were read: put that one "
                "in its place, or run the job again"
            )
    return jobs


def _tables(groups: Mapping[str, Any]) -> dict[int, str]:
    """Return the folders of jobs that steps of `rows` read as tables, by the index of the step."""
    tables = {}
    for index, step in enumerate(groups.get("rows") or ()):
        path = _options(step).get(_PATH)
        if isinstance(path, str) and (user_path(path, "rows") / "manifest.json").is_file():
            tables[index] = path
    return tables


def _options(step: Mapping[str, Any]) -> Any:
    """Return the options of a step of `rows`, which is given by its class or by its short name."""
    if "_target_" in step:
        return step
    (options,) = step.values()
    return options or {}


def lock_step(
    groups: Mapping[str, Any], parents: Sequence[str], tables: Mapping[int, str]
) -> dict[str, Any]:
    """Convert the configuration of a job to a step of a lock. Keys without a value are left out if
    the defaults compose to the same configuration.

    Args:
        groups: the job's configuration by group.
        parents: the names of the steps whose rows are the data set.
        tables: index of a step of `rows` → the name of the step whose rows it reads.
    """
    kept: dict[str, Any] = {}
    for name in _GROUPS:
        group = groups.get(name)
        if isinstance(group, dict):
            left_out = _NOT_KEPT.get(name, set())
            kept[name] = {key: value for key, value in group.items() if key not in left_out}
        elif group:
            kept[name] = group
    short = {
        name: _set_keys(group) if isinstance(group, dict) else group for name, group in kept.items()
    }
    if _composed(short) != _composed(kept):
        short = kept
    values: dict[str, Any] = deepcopy(short)
    if parents:
        del values["dataset"][_PATH]
        values = {FROM: parents[0] if len(parents) == 1 else list(parents), **values}
    for index, name in tables.items():
        options = _options(values["rows"][index])
        del options[_PATH]
        options[FROM] = name
    return values


def _set_keys(group: Mapping[str, Any]) -> dict[str, Any]:
    return {key: value for key, value in group.items() if value is not None}


def _composed(values: Mapping[str, Any]) -> dict[str, Any]:
    """Return the full configuration that the values of a job compose to. No code that the values
    name is run."""
    with_folder = {**values, "output": {**values["output"], "dir": "."}}
    return resolved(load_config(compose_groups(with_folder).groups, TYPED))
