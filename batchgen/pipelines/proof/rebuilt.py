"""Makes the rows of a lock file again, and compares their digests with the file's."""

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
    """A rebuilt step: its `difference` from the lock in words, None if its rows are equal.
    `same_bytes` says whether its files are equal as well."""

    name: str
    rows: int
    shards: int
    difference: str | None
    same_bytes: bool


def rebuild(jobs: LockedJobs, say: Callable[[str], None]) -> Iterator[RebuiltStep | int]:
    """Run the steps of a lock, each in its folder, and compare each when it is complete. Steps that
    are complete there are not run again.

    Yields:
        Each step, and at last the number of a signal if one has stopped a step.

    Raises:
        ConfigError: model or data are not those of the lock. Nothing of that step was computed.
        JobError: a step cannot go on.
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
    """Open a job. Raises ConfigError unless its models and data are those of the lock."""
    if proof.dataset_rows is not None and config.dataset.kind in ("files", "hub", "demo"):
        # Rows that were added since are not of the set.
        config = replace(config, dataset=replace(config.dataset, limit=proof.dataset_rows))
    parts = resolve_job(config)
    try:
        manifest = job_manifest(config, parts, output_schema(config, parts))
        fingerprints = without_places(manifest.fingerprints)
        lines = [
            f"{what}: {known} in the lock, {fingerprints.get(what, 'none')} here"
            for what, known in proof.fingerprints.items()
            if what != _DATASET
            and not what.startswith(READ_JOB)
            and fingerprints.get(what) != known
        ]
        lines += _other_data(parts, proof, fingerprints.get(_DATASET))
        if lines:
            raise ConfigError(
                f"step {name} was made from something else than what is here:\n  "
                + "\n  ".join(lines)
            )
        yield config, parts
    finally:
        parts.close()


def _other_data(parts: ResolvedJob, proof: StepProof, fingerprint: str | None) -> Iterator[str]:
    """How the rows that a step reads differ from those of the lock; of other jobs only the rows
    that this one makes are compared."""
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
    """Compare a step with its proof in the lock."""
    same_bytes = list(proof.files) == digests.files if proof.files else True
    return RebuiltStep(
        name, digests.rows, len(digests.files), _difference(proof, digests), same_bytes
    )


def _difference(proof: StepProof, digests: FolderDigests) -> str | None:
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
