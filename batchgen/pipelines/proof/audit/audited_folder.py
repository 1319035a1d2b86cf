"""Audits the folder of a job, of a pipeline or of a set: some rows are computed again and compared.

`batchgen audit` calls `audit_steps`. A *set* is a folder of rows that `batchgen select` or `export`
wrote from jobs.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import closing
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from batchgen.config.compose.compose_config import compose_groups
from batchgen.config.compose.job_file import read_job_file
from batchgen.config.compose.load_config import load_config
from batchgen.config.compose.trust import Trust
from batchgen.config.groups.job_config import JobConfig
from batchgen.pipelines.proof.audit.audited_job import (
    AuditedRow,
    audit_remarks,
    audit_rows,
    open_parts,
)
from batchgen.pipelines.proof.audit.audited_set import (
    SetRow,
    audit_set_rows,
    chosen_rows_of_set,
    job_of_set,
)
from batchgen.pipelines.proof.audit.operations import compare_operations
from batchgen.pipelines.proof.audit.stored_rows import StoredRows
from batchgen.pipelines.publish.finished_rows import SET_FILE, FinishedRows, is_set, open_rows
from batchgen.pipelines.trace.source_places import places_beside
from batchgen.storage.folder.open_folder import open_folder
from batchgen.storage.folder.pipeline_record import PipelineRecord
from batchgen.storage.folder.read_job import JobFolderReader
from batchgen.storage.folder.step_folders import find_record, is_pipeline
from batchgen.storage.shards.shard_files import shard_files
from batchgen.storage.stores.manifest import Manifest
from batchgen.util.errors import ConfigError
from batchgen.util.paths import folder_here, user_path

CONFIG = "config.yaml"
_VERB = "batchgen audit"


@dataclass(frozen=True)
class AuditResult:
    """The result of an audit.

    Attributes:
        rows: the rows that were computed again.
        total: the number of rows of the job or set.
        remarks: reasons why rows may differ.
    """

    rows: Sequence[AuditedRow]
    total: int
    remarks: Sequence[str]


def audit_steps(
    job_path: str,
    rows: int,
    seed: int,
    overrides: Sequence[str],
    trusted: Sequence[str],
    *,
    operations: bool = False,
) -> Iterator[tuple[str | None, AuditResult]]:
    """Audit a folder, or all steps of a pipeline that have shards, one after the other.

    Args:
        rows: the number of rows; each step gets its share, at least one.
        overrides: see `audit_folder`; for a pipeline, STEP.KEY=VALUE is for one step.

    Yields:
        The name of each step (None for a job or a set) and the result of `audit_folder`.
    """
    if is_set(job_path) or not is_pipeline(
        out := str(user_path(folder_here(job_path, _VERB), "OUT"))
    ):
        yield None, audit_folder(job_path, rows, seed, overrides, trusted, operations=operations)
        return
    record = find_record(out)
    assert record is not None
    begun = [name for name, folder in record.current.items() if _has_shards(Path(out, folder))]
    if not begun:
        raise ConfigError(f"{job_path}: no step of the pipeline has shards yet")
    for index, name in enumerate(begun):
        # The first steps get the rows that remain after an equal division.
        share = max(1, rows // len(begun) + (index < rows % len(begun)))
        step_overrides = list(_of_step(overrides, name, record))
        folder = f"{out}/{record.current[name]}"
        yield (
            name,
            audit_folder(folder, share, seed, step_overrides, trusted, operations=operations),
        )


def _has_shards(folder: Path) -> bool:
    return (folder / "data").is_dir() and bool(shard_files(folder / "data"))


def _of_step(overrides: Sequence[str], name: str, record: PipelineRecord) -> Iterator[str]:
    """The arguments that apply to a step. Arguments about the data set do not apply to steps that
    read other steps."""
    step = record.steps[name]
    assert step.current is not None
    parents = step.versions[step.current].parents
    for argument in overrides:
        first, _, rest = argument.partition(".")
        if first == name:
            yield rest
        elif first not in record.steps and not (parents and first == "dataset"):
            yield argument


def audit_folder(
    user_path: str,
    rows: int,
    seed: int,
    overrides: Sequence[str] = (),
    trusted: Sequence[str] = (),
    *,
    operations: bool = False,
) -> AuditResult:
    """Compute some rows of a job or of a set again, and compare them with the stored ones. `seed`
    decides which rows.

    Args:
        overrides: arguments `key=value`, added to the folder's configuration.
        trusted: the values of `--trust`.
        operations: compare the engine's operations between rows computed together and one by one,
            instead of comparing with stored rows.

    Raises:
        ConfigError: the folder lacks what is needed, or the model or the data set has changed.
        JobError: a file is damaged, or the rows cannot be computed.
    """
    if is_set(user_path):
        if operations:
            raise ConfigError(f"audit --operations: {user_path} is a set of rows: name their job")
        return _audit_set(open_rows(user_path), rows, seed, overrides, trusted)
    reader = open_folder(user_path, "audit")
    config = _with_jobs_beside(config_of(reader, user_path, overrides, trusted), reader.path)
    stored = StoredRows(reader)
    numbers = stored.choose(rows, seed)
    manifest = Manifest.read(reader.path / "manifest.json")
    with closing(open_parts(config, manifest, user_path)) as parts:
        if operations:
            results = compare_operations(config, parts, numbers, reader.storage)
        else:
            tables = dict(zip(numbers, stored.rows(numbers), strict=True))
            results = audit_rows(config, parts, tables, reader.storage)
    return AuditResult(results, stored.count, audit_remarks(config, manifest))


def _audit_set(
    finished: FinishedRows, rows: int, seed: int, overrides: Sequence[str], trusted: Sequence[str]
) -> AuditResult:
    """Audit a set: compute the drawn rows of each of its jobs again."""
    assert finished.facts is not None
    path, by_job = finished.storage.path / SET_FILE, dict[str, list[SetRow]]()
    for row in chosen_rows_of_set(finished, rows, seed):
        by_job.setdefault(row.job, []).append(row)
    audited, remarks = list[AuditedRow](), list[str]()
    for job, job_rows in by_job.items():
        values, manifest = job_of_set(finished, job)
        config = configured(values, {}, path, overrides, trusted)
        config = _with_jobs_beside(config, finished.storage.path)
        text_as = str(finished.facts["text_column"])
        audited += audit_set_rows(config, manifest, job_rows, finished.user_path, text_as)
        remarks += audit_remarks(config, manifest)
    return AuditResult(audited, finished.total, list(dict.fromkeys(remarks)))


def _with_jobs_beside(config: JobConfig, folder: Path) -> JobConfig:
    """The configuration of a job. If its folder was copied together with the jobs that it reads,
    their paths are those of the copies."""
    if config.dataset.kind != "job":
        return config
    paths = tuple(places_beside(config.dataset.paths, folder))
    path = paths[0] if len(paths) == 1 else paths
    return replace(config, dataset=replace(config.dataset, path=path, follow=False))


def config_of(
    reader: JobFolderReader, user_path: str, overrides: Sequence[str], trusted: Sequence[str]
) -> JobConfig:
    """The configuration of a job's folder, with the user's arguments.

    Raises:
        ConfigError: there is no configuration, or it names code that the user does not trust.
    """
    path = reader.path / CONFIG
    if not path.is_file():
        raise ConfigError(
            f"{user_path} has no {CONFIG}, which says how the rows were made: they cannot be "
            "computed again"
        )
    values, locations = read_job_file(path)
    return configured(values, locations, path, overrides, trusted)


def configured(
    values: Mapping[str, Any],
    locations: Mapping[str, str],
    path: Path,
    overrides: Sequence[str],
    trusted: Sequence[str],
) -> JobConfig:
    """Compose a job from the values of a file at `path` and the user's arguments."""
    groups = compose_groups(values, overrides, locations=locations).groups
    return load_config(groups, Trust.of([path], trusted, overrides))
