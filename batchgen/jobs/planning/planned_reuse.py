"""Counts, for a plan, the answers that a job will copy from older jobs (`output.reuse`)."""

from __future__ import annotations

from contextlib import closing
from dataclasses import dataclass

from batchgen.config.groups.job_config import JobConfig
from batchgen.inputs.dataset.seed_stream import stream_of
from batchgen.jobs.forecast.scan import Scan
from batchgen.jobs.resolve.opened_job import OpenedJob
from batchgen.jobs.reuse.key_index import KeyIndex
from batchgen.jobs.reuse.key_log import read_keys
from batchgen.jobs.reuse.row_key import RowKeys
from batchgen.jobs.reuse.row_reuse import OlderJobs
from batchgen.jobs.run.checked_rows import output_schema, pin_values
from batchgen.storage.folder.refused_folder import written_manifest
from batchgen.storage.stores.open_storage import open_storage


@dataclass(frozen=True)
class PlannedReuse:
    """The number of answers that will be copied from older jobs.

    Attributes:
        answers: the number of answers.
        looked_at: the number of rows that were looked up.
        is_exact: whether these are all rows; otherwise `answers` is extrapolated from them.
    """

    answers: int
    looked_at: int
    is_exact: bool

    @property
    def text(self) -> str:
        number = f"{self.answers:,}" if self.is_exact else f"about {self.answers:,}"
        sample = "" if self.is_exact else f" (estimated from a sample of {self.looked_at:,} rows)"
        return f"{number} answers are copied from older jobs{sample}"


def planned_reuse(config: JobConfig, opened: OpenedJob, scan: Scan) -> PlannedReuse | None:
    """Count the answers that a job will copy from the folders in `output.reuse`.

    Returns None if `output.reuse` names no folder, or only folders without rows. Answers that are
    already in the job's output folder do not count.
    """
    if not (folders := config.output.reuse):
        return None
    # The keys of rows depend on values that are fixed at a job's start, and on fingerprints.
    config, opened = pin_values(config, opened), opened.with_fingerprints()
    with closing(OlderJobs(folders, output_schema(config, opened), present_only=True)) as older:
        if not len(older):
            return None
        number = _copied(config, opened, scan, older)
    rows = scan.num_rows or scan.looked_at  # of a stream the total is not known
    # `scan.sample` has the rows with a prompt, and `num_bad` counts those without.
    if len(scan.sample) + scan.num_bad == rows:
        return PlannedReuse(number, rows, is_exact=True)
    share = rows * (1 - scan.bad_share) / max(len(scan.sample), 1)
    return PlannedReuse(round(number * share), len(scan.sample), is_exact=False)


def _copied(config: JobConfig, opened: OpenedJob, scan: Scan, older: OlderJobs) -> int:
    """Count the samples of the scan's rows that an older job has and this job lacks.

    Where samples begin in waves, only samples before the first missing one count.
    """
    keys = RowKeys(config, opened.fingerprints, opened.max_model_len)
    stream = stream_of(config.sampling.stream, opened.source.jobs)
    with closing(open_storage(config.output.dir, config.workers)) as storage:
        is_there = written_manifest(storage) is not None
        job_keys = KeyIndex([read_keys(storage)] if is_there else [])
    count = 0
    for row, request in scan.sample:
        for sample in range(config.sampling.most_samples):
            key = keys.key(request.of_sample(row.id, sample, stream))
            is_done = bool(job_keys.find(key))
            is_available = is_done or older.has(key)
            count += is_available and not is_done
            if config.sampling.until is not None and not is_available:
                break
    return count
