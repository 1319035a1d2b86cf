"""Audits rows of a job: computes them again and compares them with the shards, bit by bit.

The *contract* of a job is what decides the bits of its rows besides models, data and configuration,
such as the type of GPU. Only jobs with engine.deterministic=true on a GPU have one.
"""

from __future__ import annotations

import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import pyarrow as pa
import pyarrow.compute as pc

from batchgen.config.groups.job_config import JobConfig
from batchgen.inputs.dataset.row_digest import rows_digest
from batchgen.inputs.model.open_model import device_of
from batchgen.jobs.resolve.open_job import resolve_job
from batchgen.jobs.resolve.resolved_job import ResolvedJob
from batchgen.jobs.run.checked_rows import job_manifest, output_schema
from batchgen.jobs.run.image_files import content_of
from batchgen.pipelines.proof.audit.first_difference import first_difference
from batchgen.pipelines.proof.audit.rows_again import compute_again
from batchgen.storage.shards.row_order import ROW_COLUMN, SAMPLE_COLUMN
from batchgen.storage.stores.job_storage import Storage
from batchgen.storage.stores.manifest import Manifest
from batchgen.util.errors import ConfigError


@dataclass(frozen=True)
class AuditedRow:
    """An input row whose samples were computed again.

    Attributes:
        row_id: its id.
        samples: the number of its samples.
        difference: the first value that differs, in words; None if all are equal to the bit.
    """

    row_id: str
    samples: int
    difference: str | None


def open_parts(config: JobConfig, stored: Manifest, display_name: str) -> ResolvedJob:
    """Open the model and the data set of a configuration, and check that `stored` describes the
    same ones.

    Raises:
        ConfigError: they differ; the message says how.
    """
    parts = resolve_job(config)
    try:
        manifest = job_manifest(config, parts, output_schema(config, parts))
        source = content_of(parts.source, parts.prompt)
        lines = stored.differences(manifest, lambda stop: rows_digest(source, stop))
        if lines and lines == stored.other_contract(manifest):
            raise ConfigError(
                f"{display_name}: its rows were computed under another contract of bits than "
                "this machine's:\n  "
                + "\n  ".join(lines)
                + (
                    "\nequal bits cannot be expected here: audit the job on a machine with the "
                    "same contract, or compare anyway with engine.deterministic=false"
                )
            )
        if lines:
            raise ConfigError(
                f"{display_name}: the configuration that was read does not describe how its "
                "rows were made:\n  "
                + "\n  ".join(lines)
                + "\nname the model and data set of the job with "
                "model.path=… and dataset.path=…"
            )
    except BaseException:
        parts.close()
        raise
    return parts


def audit_rows(
    config: JobConfig,
    parts: ResolvedJob,
    stored: Mapping[int, pa.Table],
    storage: Storage | None,
) -> list[AuditedRow]:
    """Compute input rows again, and compare their samples with the stored ones. The recomputed rows
    are counted from 0, in the order of `stored`.

    All stored columns are compared, to the bit, except those whose values do not depend on the row
    alone (`Strategy.by_schedule`).

    Args:
        stored: `row_index` of an input row → its stored samples.
        storage: the job's storage, which may have a row index.
    """
    numbers = list(stored)
    with tempfile.TemporaryDirectory(prefix="batchgen-audit-") as folder:
        again = compute_again(config, parts, numbers, Path(folder), storage)
    tables = (again.filter(pc.equal(again[ROW_COLUMN], index)) for index in range(len(numbers)))
    pairs = zip(tables, stored.values(), strict=True)
    return [_audited(table, samples, parts.by_schedule) for table, samples in pairs]


def _audited(again: pa.Table, stored: pa.Table, by_schedule: frozenset[str]) -> AuditedRow:
    """Compare the samples of one row."""
    row_id = again["row_id"][0].as_py()
    samples = stored[SAMPLE_COLUMN].to_pylist()
    samples_again = again[SAMPLE_COLUMN].to_pylist()
    names = [name for name in again.schema.names if name in stored.schema.names]
    names = [name for name in names if name not in by_schedule]
    if missing := [sample for sample in samples if sample not in samples_again]:
        difference = f"the job has a sample {missing[0]}, and the recomputed row has none"
        return AuditedRow(row_id, len(samples), difference)
    for index, sample in enumerate(samples):
        computed = again.slice(samples_again.index(sample), 1)
        if (text := first_difference(computed, stored.slice(index, 1), names)) is not None:
            return AuditedRow(row_id, len(samples), f"sample {sample}: {text}")
    return AuditedRow(row_id, len(samples), None)


def audit_remarks(config: JobConfig, manifest: Manifest) -> Sequence[str]:
    """Sentences that say why rows may differ although the folder describes the job correctly."""
    remarks = []
    if manifest.contract and not config.engine.deterministic:
        remarks.append(
            "the job's rows keep their bits under one contract (engine.deterministic=true), and "
            "they were computed again without it"
        )
    elif device_of(config.engine.device).type == "cuda" and not manifest.contract:
        remarks.append(
            "computed here on a GPU: on another type of GPU, and in batches of another size, sums "
            "are rounded differently, and bits may differ"
        )
    if manifest.batch_dependence is not None:
        remarks.append(f"the job says of its own bits: {manifest.batch_dependence}")
    now = Manifest.build({}, {}).versions
    others = [
        f"{name} {version} (here {now[name]})"
        for name, version in manifest.versions.items()
        if name in now and now[name] != version
    ]
    if others:
        remarks.append(f"the job ran with {', '.join(others)}")
    return remarks
