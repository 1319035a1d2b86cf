"""Counts, for a plan, the answers that a job will copy from older jobs (`output.reuse`)."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import closing
from dataclasses import dataclass

from batchgen.config.groups.job_config import JobConfig
from batchgen.engine.interface.outputs import RequestError
from batchgen.inputs.dataset.seed_stream import stream_of
from batchgen.inputs.dataset.source import Row
from batchgen.inputs.prompts.row_request import RowRequest
from batchgen.jobs.forecast.scan import Scan
from batchgen.jobs.resolve.opened_job import OpenedJob
from batchgen.jobs.reuse.key_index import KeyIndex
from batchgen.jobs.reuse.key_log import read_keys
from batchgen.jobs.reuse.row_key import RowKeys
from batchgen.jobs.reuse.row_reuse import OlderJobs
from batchgen.jobs.run.checked_rows import lasting, output_schema, row_request
from batchgen.storage.folder.refused_folder import written_manifest
from batchgen.storage.stores.open_storage import open_storage


@dataclass(frozen=True)
class PlannedReuse:
    """The number of answers that will be copied, judged from the rows that were `looked_at`. These
    are all rows if the number `is_exact`; otherwise they are a sample, from which it is
    extrapolated."""

    answers: int
    looked_at: int
    is_exact: bool

    @property
    def text(self) -> str:
        number = f"{self.answers:,}" if self.is_exact else f"about {self.answers:,}"
        sample = "" if self.is_exact else f" (reckoned from a sample of {self.looked_at:,} rows)"
        return f"{number} answers are copied from older jobs{sample}"


def planned_reuse(config: JobConfig, opened: OpenedJob, scan: Scan) -> PlannedReuse | None:
    """Count the answers that a job will copy from the folders in `output.reuse`; None if it names
    no folders, or none with rows. Answers that are already in the job's own folder do not count."""
    if not (folders := config.output.reuse):
        return None
    config, opened = lasting(config, opened), opened.with_fingerprints()
    schema = output_schema(config, opened)
    with closing(OlderJobs(folders, schema, only_there=True)) as older:
        if not len(older):
            return None
        copied = _Copied(
            config,
            RowKeys(config, opened.fingerprints, opened.max_model_len),
            row_request(config, opened),
            older,
            stream_of(config.sampling.stream, opened.source.jobs),
        )
        number = sum(copied.answers(read.row) for read in scan.sample)
        rows = scan.num_rows or scan.looked_at
        if len(scan.sample) + scan.num_bad == rows:
            return PlannedReuse(number, rows, True)
        share = rows * (1 - scan.bad_share) / max(len(scan.sample), 1)
        return PlannedReuse(round(number * share), len(scan.sample), False)


class _Copied:
    """Looks up rows of the job in older jobs."""

    def __init__(
        self,
        config: JobConfig,
        keys: RowKeys,
        request: Callable[[Row], RowRequest],
        older: OlderJobs,
        stream: str | None,
    ) -> None:
        self._keys, self._request, self._older, self._stream = keys, request, older, stream
        self._samples = config.sampling.most_samples
        self._in_waves = config.sampling.until is not None
        with closing(open_storage(config.output.dir, config.workers)) as storage:
            is_there = written_manifest(storage) is not None
            self._own = KeyIndex([read_keys(storage)] if is_there else [])

    def answers(self, row: Row) -> int:
        """The number of samples of a row that will be copied: those that an older job has and this
        one lacks. With `sampling.until` only samples before the first missing one count."""
        try:
            request = self._request(row)
        except RequestError:
            return 0
        count = 0
        for sample in range(self._samples):
            key = self._keys.key(request.of_sample(row.id, sample, self._stream))
            is_own = bool(self._own.find(key))
            is_there = is_own or self._older.has(key)
            count += is_there and not is_own
            if self._in_waves and not is_there:
                break
        return count
