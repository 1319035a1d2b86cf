"""Copies rows that older jobs have computed with equal keys (`output.reuse`), and keeps the keys of
new rows.

`Generation` uses a `RowReuse`; a plan counts the rows to copy with `OlderJobs`.
"""

from __future__ import annotations

import sys
from collections.abc import Mapping, Sequence

import numpy as np

from batchgen.config.groups.job_config import JobConfig
from batchgen.inputs.prompts.row_request import RowRequest
from batchgen.jobs.reuse.key_index import KeyIndex
from batchgen.jobs.reuse.key_log import KeyLog, Records, read_keys
from batchgen.jobs.reuse.older_rows import OlderRows
from batchgen.jobs.reuse.row_key import RowKeys
from batchgen.storage.folder.open_folder import open_job_reader
from batchgen.storage.folder.read_job import JobFolderReader
from batchgen.storage.shards.output_schema import FinishedRow, OutputSchema, SplitOutput
from batchgen.storage.shards.row_order import KEYS, row_keys
from batchgen.storage.stores.job_storage import Storage
from batchgen.util.errors import ConfigError, JobError
from batchgen.util.request_id import RequestId


class OlderJobs:
    """The rows of older jobs, by their keys."""

    def __init__(
        self, folders: Sequence[str], schema: OutputSchema, *, present_only: bool = False
    ) -> None:
        """Read the keys in the folders, which are tried in this order.

        A folder is left out, with a warning on stderr, if its rows cannot be used: it is not a
        job's, lacks a column or is damaged. `present_only` leaves out keys of rows that were
        dropped; `copy` does not find such rows in any case.
        """
        self._folders: list[tuple[str, OlderRows]] = []
        self._opened: list[Storage] = []
        records: list[Mapping[int, Records]] = []
        for folder in folders:
            try:
                reader = open_job_reader(folder)
                self._opened.append(reader.storage)
                rows = OlderRows(reader, schema)
                if (name := rows.lacking()) is not None:
                    _leave_out(folder, f"its rows have no column {name} as this job writes it")
                    continue
                keys = read_keys(reader.storage)
                records.append(_present_records(reader, keys) if present_only else keys)
            except (ConfigError, JobError) as error:
                _leave_out(folder, str(error))
                continue
            self._folders.append((folder, rows))
        self._index = KeyIndex(records)
        self._damaged: set[int] = set()  # indices of folders that turned out to be damaged

    def __len__(self) -> int:
        return len(self._index)

    def close(self) -> None:
        """Close the folders."""
        for storage in self._opened:
            storage.close()

    def has(self, key: bytes) -> bool:
        """Whether a row with this key was finished in one of the jobs."""
        return bool(self._index.find(key))

    def copy(self, key: bytes, request_id: RequestId, request: RowRequest) -> SplitOutput | None:
        """The output of a request, copied from the first job that has a row with this key; None if
        no job has one."""
        for location in self._index.find(key):
            folder, rows = self._folders[location.job]
            if location.job in self._damaged:
                continue
            try:
                output = rows.output(location, request_id, request)
            except (ConfigError, JobError, FileNotFoundError) as error:
                self._damaged.add(location.job)
                _leave_out(folder, str(error))
                continue
            if output is not None:
                return output
        return None


class RowReuse:
    """The keys of a running job's rows, and the rows of older jobs."""

    def __init__(self, keys: RowKeys, log: KeyLog, older: OlderJobs) -> None:
        self._keys, self._log, self._older = keys, log, older

    def key(self, request: RowRequest) -> bytes:
        """The key of a request whose parameters have the seed of the row's sample."""
        return self._keys.key(request)

    def copy(self, key: bytes, request_id: RequestId, request: RowRequest) -> SplitOutput | None:
        """The output of a request, copied from an older job; None if no older job has a row with
        this key."""
        return self._older.copy(key, request_id, request)

    def keep(self, rows: Sequence[FinishedRow]) -> None:
        """Record the keys of rows that were just written."""
        self._log.append(rows)

    def close(self) -> None:
        """Upload the recorded keys, and close the folders."""
        self._log.send()
        self._older.close()


def row_reuse(
    config: JobConfig,
    fingerprints: Mapping[str, str],
    max_model_len: int,
    schema: OutputSchema,
    storage: Storage,
) -> RowReuse | None:
    """Make a job's `RowReuse`; None if `output.reuse` is null, so that the job neither keeps keys
    nor copies rows."""
    folders = config.output.reuse
    if folders is None:
        return None
    keys = RowKeys(config, fingerprints, max_model_len)
    log = KeyLog(storage, config.output.rows_per_shard)
    return RowReuse(keys, log, OlderJobs(folders, schema))


def _present_records(reader: JobFolderReader, keys: Mapping[int, Records]) -> dict[int, Records]:
    """The records of rows that are in the job's shards."""
    present = {}
    for shard, records in keys.items():
        rows = [row_keys(batch) for batch in reader.shard(shard).batches(KEYS)]
        record_keys = (records["row_index"] << 31) | records["sample_index"]
        present[shard] = records[
            np.isin(record_keys, np.concatenate([np.empty(0, np.int64), *rows]))
        ]
    return present


def _leave_out(folder: str, why: str) -> None:
    """Warn that a folder is left out."""
    print(
        f"batchgen: warning: output.reuse: no rows of {folder} are copied: {why}",
        file=sys.stderr,
        flush=True,
    )
