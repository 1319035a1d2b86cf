"""Writes the costs of rows into the folder `cost` while a job runs; see `cost_files`."""

from __future__ import annotations

import time
from collections.abc import Hashable, Iterable

from batchgen.storage.costs.cost_files import COST, Costs, cost_path, read_costs, write_costs
from batchgen.storage.stores.job_storage import Storage
from batchgen.util.errors import JobError
from batchgen.util.request_id import RequestId

SAVE_SECONDS = 30.0  # between two saves


class CostRecorder:
    """Sums the seconds that one worker measures for each row, and writes them shard by shard.

    Memory holds the shards whose costs have changed since the last save but one. If the files
    cannot be written, the job continues without them, because no row depends on its cost.

    Attributes:
        seconds: the sum over all rows in this attempt.
    """

    def __init__(self, storage: Storage, rows_per_shard: int, worker: int) -> None:
        """Make the folder `cost`; the job's folder must exist."""
        self._storage, self._worker = storage, worker
        self._rows_per_shard = rows_per_shard
        self._known: dict[int, Costs] = {}  # by shard
        self._changed: set[int] = set()
        self._saved = time.monotonic()
        self.seconds = 0.0
        storage.make_folder(storage.path / COST)

    def add(self, costs: Iterable[tuple[Hashable, float]]) -> None:
        """Add the seconds of requests to their rows. The scored choices of a row count as part of
        the row."""
        for request_id, seconds in costs:
            assert isinstance(request_id, RequestId)
            row, sample = request_id.row, request_id.sample
            shard = row // self._rows_per_shard
            if shard not in self._known:
                self._known[shard] = self._on_disk(shard)
            known = self._known[shard]
            known[row, sample] = known.get((row, sample), 0.0) + seconds
            self._changed.add(shard)
            self.seconds += seconds

    def due(self) -> bool:
        """Whether SAVE_SECONDS have passed since the last save."""
        return time.monotonic() - self._saved >= SAVE_SECONDS

    def save(self) -> None:
        """Write the shards whose costs have changed."""
        self._saved = time.monotonic()
        self._storage.confirm()
        for shard in set(self._known) - self._changed:
            del self._known[shard]
        for shard in sorted(self._changed):
            path = cost_path(self._storage.path, shard, self._worker)
            try:
                write_costs(self._storage, path, self._known[shard])
            except (OSError, JobError):  # others have completed the job, or the disk is full
                return
            self._changed.remove(shard)

    def _on_disk(self, shard: int) -> Costs:
        """The costs of a shard that this worker, or a worker of an earlier attempt with its number,
        has written."""
        path = cost_path(self._storage.path, shard, self._worker)
        try:
            return read_costs(self._storage, path) if self._storage.exists(path) else {}
        except (OSError, JobError):  # a damaged file is replaced
            return {}
