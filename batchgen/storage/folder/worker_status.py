"""Reads from a job's folder what each of its workers is doing, for `batchgen status`."""

from __future__ import annotations

import time
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

from batchgen.storage.folder.job_summary import tokens_per_s
from batchgen.storage.leases.failure_detector import read_beat
from batchgen.storage.leases.lease_files import (
    LEASES,
    WORKERS,
    lease_name,
    mark_name,
    parse_worker,
    worker_name,
)
from batchgen.storage.leases.lease_table import Lease, LeaseTable
from batchgen.storage.leases.process_identity import is_gone
from batchgen.storage.stores.folder_storage import names_in
from batchgen.storage.stores.job_storage import Storage


@dataclass(frozen=True)
class WorkerState:
    """The state of one worker.

    Attributes:
        beat: its last heartbeat.
        silent: seconds from the time of that heartbeat, by the clock of the file system or store,
            until now, by this machine's clock. If the two clocks differ, so do `silent` and whether
            the state is `running` or `silent`. Workers themselves never compare clocks
            (`FailureDetector`).
        state: `running`; `silent` if its heartbeat is old; `gone` if its process has ended without
            reporting it; `unreadable` if its heartbeat cannot be read; otherwise how the worker
            ended.
        shards: the shards that it has begun and no worker has completed.
        backups: the shards of which it computes a copy.
    """

    beat: Mapping[str, Any]
    silent: float
    state: str
    shards: list[int]
    backups: list[int]

    @property
    def name(self) -> str:
        name = self.beat.get("name")
        return "" if name is None else str(name)

    @property
    def attempt(self) -> Mapping[str, Any]:
        attempt: Mapping[str, Any] = self.beat.get("attempt", {})
        return attempt

    @property
    def tokens_per_s(self) -> float:
        return tokens_per_s(self.attempt) if self.state == "running" else 0.0


@dataclass(frozen=True)
class Status:
    """The workers and the shards of a job.

    Attributes:
        workers: the workers by their numbers.
        done, begun: the number of shards that are complete, and of those in progress.
        quarantined: shard → the workers that crashed on it.
    """

    workers: list[WorkerState]
    done: int
    begun: int
    quarantined: Mapping[int, tuple[int, ...]]


def read_status(storage: Storage, stale_after: float) -> Status:
    """Read the state of a job's workers; a complete job has no workers.

    A worker without a heartbeat for `stale_after` seconds counts as silent.
    """
    table = LeaseTable.of(names_in(storage, LEASES))
    open_shards = {  # → the number of the shard's last lease
        shard: epoch
        for shard, epoch in table.epochs.items()
        # Numbers below 0 are of leases for other work, such as grading.
        if shard >= 0 and shard not in table.done | table.quarantined
    }
    owners = {s: _lease(storage, lease_name(s, epoch)) for s, epoch in open_shards.items()}
    copiers = {
        s: _lease(storage, lease_name(s, epoch, "b"))
        for s, epoch in table.backups.items()
        if s in open_shards
    }
    workers = []
    for number in sorted(n for name in names_in(storage, WORKERS) if (n := parse_worker(name))):
        path = storage.path / worker_name(number)
        content, written = storage.read(path), storage.modified(path)
        if content is None or written is None:  # the job is complete
            continue
        shards = sorted(s for s, owner in owners.items() if owner.worker == number)
        backups = sorted(s for s, owner in copiers.items() if owner.worker == number)
        silent = max(0.0, time.time() - written)
        beat = read_beat(content)
        about = {"worker": number, "host": "?", "pid": "?", "ended": None, **(beat or {})}
        worker = _worker(about, silent, stale_after, shards, backups)
        workers.append(worker if beat is not None else replace(worker, state="unreadable"))
    quarantined = {  # a mark of quarantine has the form of a lease
        shard: _lease(storage, mark_name(shard, "quarantined")).ended
        for shard in sorted(table.quarantined)
    }
    return Status(workers, len(table.done), len(open_shards), quarantined)


def _lease(storage: Storage, name: str) -> Lease:
    """Read a lease. A lease that cannot be read, or was just deleted, gets the owner 0."""
    return Lease.decoded(storage.read(storage.path / name)) or Lease(0)


def _worker(
    beat: Mapping[str, Any],
    silent: float,
    stale_after: float,
    shards: list[int],
    backups: list[int],
) -> WorkerState:
    """The state of a worker by its heartbeat."""
    if beat["ended"] is not None:
        # The attempt's status says more, but not if the worker stopped before it could set it.
        status = beat.get("attempt", {}).get("status")
        state = beat["ended"] if status in (None, "", "running") else status
    elif is_gone(beat):
        state = "gone"
    else:
        state = "silent" if silent > stale_after else "running"
    return WorkerState(beat, silent, state, shards, backups)
