"""Makes the rows of a lock file again, and compares their digests with those in the file. `batchgen
rebuild` uses it."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path

from batchgen.config.groups.job_config import JobConfig
from batchgen.inputs.dataset.row_digest import rows_digest
from batchgen.jobs.resolve.open_job import resolve_job
from batchgen.jobs.resolve.resolved_job import ResolvedJob
from batchgen.jobs.run.checked_rows import job_manifest, output_schema
from batchgen.jobs.run.image_files import content_of
from batchgen.jobs.run.run_job import execute_job
from batchgen.pipelines.proof.folder_proof import FolderDigests, folder_digests, without_places
from batchgen.pipelines.proof.lock_file import StepProof
from batchgen.pipelines.proof.locked_jobs import LockedJobs
from batchgen.storage.stores.manifest import READ_JOB
from batchgen.util.errors import ConfigError

_DATASET = "dataset"


@dataclass(frozen=True)
class RebuiltStep:
    """A step that was rebuilt and compared with the lock.

    Attributes:
        difference: how the rows differ from those of the lock, in words; None if they are equal.
        same_bytes: whether the bytes of the files are equal as well; True if the lock has no
            digests of files.
    """

    name: str
    rows: int
    shards: int
    difference: str | None
    same_bytes: bool


def rebuild(jobs: LockedJobs, say: Callable[[str], None]) -> Iterator[RebuiltStep | int]:
    """Run the steps of a lock, each in its folder, and compare each step after it. A step that is
    already complete in its folder is not run again.

    Args:
        say: prints a line of progress.

    Yields:
        Each step. If a signal stops a step, the number of the signal, as the last item.

    Raises:
        ConfigError: model or data differ from those of the lock. The step has not run.
        JobError: a step cannot continue.
    """
    for name, proof in jobs.lock.proof.items():
        with opened(jobs.config(name), name, proof) as (config, parts):
            say(f"step {name}: {config.output.dir}")
            result = execute_job(config, parts)
        if result.stopped_by is not None:
            yield result.stopped_by
            return
        yield rebuilt_step(name, proof, folder_digests(Path(config.output.dir)))


@contextmanager
def opened(
    config: JobConfig, name: str, proof: StepProof
) -> Iterator[tuple[JobConfig, ResolvedJob]]:
    """Open a job for the time of the `with` block, and yield its configuration and its parts.

    Raises:
        ConfigError: its models or data differ from those of the lock.
    """
    if proof.dataset_rows is not None and config.dataset.kind in ("files", "hub", "demo"):
        # Rows that were added to the data set after the lock was made are left out.
        config = replace(config, dataset=replace(config.dataset, limit=proof.dataset_rows))
    parts = resolve_job(config)
    try:
        manifest = job_manifest(config, parts, output_schema(config, parts))
        fingerprints = without_places(manifest.fingerprints)
        differences = [
            f"{key}: {expected} in the lock, {fingerprints.get(key, 'none')} here"
            for key, expected in proof.fingerprints.items()
            if key != _DATASET
            and not key.startswith(READ_JOB)
            and fingerprints.get(key) != expected
        ]
        differences += _other_data(parts, proof, fingerprints.get(_DATASET))
        if differences:
            raise ConfigError(
                f"step {name} was made from something else than what is here:\n  "
                + "\n  ".join(differences)
            )
        yield config, parts
    finally:
        parts.close()


def _other_data(parts: ResolvedJob, proof: StepProof, fingerprint: str | None) -> Iterator[str]:
    """Yield how the input rows of a step differ from those of the lock. Rows of other jobs are not
    compared here, because those jobs are steps of the lock too."""
    source = content_of(parts.source, parts.prompt)
    if proof.dataset is None or proof.dataset_rows is None:
        if not parts.source.jobs and fingerprint != proof.fingerprints.get(_DATASET):
            yield f"data set: {proof.fingerprints.get(_DATASET)} in the lock, {fingerprint} here"
        return
    if source.num_ready != proof.dataset_rows:
        yield f"data set: {proof.dataset_rows:,} rows in the lock, {source.num_ready} here"
        return
    digests = rows_digest(source, proof.dataset_rows)
    if not digests or digests[-1] != proof.dataset:
        yield f"data set: other rows, {proof.dataset} in the lock, {(digests or ['none'])[-1]} here"


def rebuilt_step(name: str, proof: StepProof, digests: FolderDigests) -> RebuiltStep:
    """Compare the digests of a folder with the proof of its step."""
    same_bytes = list(proof.files) == digests.files if proof.files else True
    return RebuiltStep(
        name, digests.rows, len(digests.files), _difference(proof, digests), same_bytes
    )


def _difference(proof: StepProof, digests: FolderDigests) -> str | None:
    """Describe the first difference from the proof; None if the rows and grades are equal."""
    if digests.columns != proof.columns:
        return "it has other columns"
    if (digests.rows, len(digests.files)) != (proof.rows, proof.shards):
        rebuilt = f"{digests.rows:,} rows in {len(digests.files):,} shards"
        return f"{rebuilt}, and {proof.rows:,} rows in {proof.shards:,} shards in the lock"
    roots = [one.hex() for one in digests.shard_roots]
    different = [str(i) for i, one in enumerate(proof.shard_roots) if one != roots[i]]
    if different:
        return f"{len(different):,} of {proof.shards:,} shards differ: {', '.join(different[:20])}"
    if digests.root.hex() != proof.root:
        return "some rows differ; the lock has too many shards to say which"
    if proof.grades is not None and (digests.grades or b"").hex() != proof.grades:
        return "the rows are equal, and their grades differ"
    return None
