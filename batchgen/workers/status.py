"""Who does what in a job's folder, read from the outside and at any time."""

from __future__ import annotations

import json
import time
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from batchgen.workers.names import FINISH, LEASES, WORKERS, lease_name, mark_name, parse_worker
from batchgen.workers.process import is_gone
from batchgen.workers.protocol import Board, Lease


@dataclass(frozen=True)
class WorkerState:
    """What is known of one worker.

    Attributes:
        beat: its last heartbeat.
        silent: seconds since that was written, as the file system says.
        state: `running`; `silent` if it was not heard of for long; `gone` if its process is not
            there any more; else how it ended.
        shards: that it has begun and nobody has completed.
        backups: those of which it computes a copy.
    """

    beat: Mapping[str, Any]
    silent: float
    state: str
    shards: list[int]
    backups: list[int]

    @property
    def name(self) -> str:
        given = self.beat.get("name")
        return "" if given is None else str(given)

    @property
    def attempt(self) -> Mapping[str, Any]:
        found: Mapping[str, Any] = self.beat.get("attempt", {})
        return found

    @property
    def tokens_per_s(self) -> float:
        attempt = self.attempt
        if self.state != "running" or not attempt:
            return 0.0
        return float(attempt["generated_tokens"] / max(attempt["generate_s"], 1e-9))


@dataclass(frozen=True)
class Status:
    """The workers of a job, and how its shards are.

    Attributes:
        quarantined: shard → the workers that it has ended.
    """

    workers: list[WorkerState]
    done: int
    begun: int
    quarantined: Mapping[int, tuple[int, ...]]


def read_status(folder: Path, stale_after: float) -> Status:
    """The state of a job's workers. The folder of a complete job has none.

    Args:
        stale_after: after how many seconds without a heartbeat a worker is called silent.
    """
    leases = folder / LEASES
    board = Board.of([path.name for path in leases.iterdir()] if leases.is_dir() else [])
    open_shards = {
        shard: epoch
        for shard, epoch in board.epochs.items()
        if shard != FINISH and shard not in board.done | board.quarantined
    }
    owners = {s: _owner(folder, lease_name(s, epoch)) for s, epoch in open_shards.items()}
    copiers = {
        s: _owner(folder, lease_name(s, epoch, "b"))
        for s, epoch in board.backups.items()
        if s in open_shards
    }
    workers = []
    for path in sorted((folder / WORKERS).iterdir()) if (folder / WORKERS).is_dir() else ():
        number = parse_worker(path.name)
        if number is not None:
            shards = sorted(s for s, owner in owners.items() if owner == number)
            backups = sorted(s for s, owner in copiers.items() if owner == number)
            workers.append(_worker(path, stale_after, shards, backups))
    quarantined = {
        shard: Lease.decoded((folder / mark_name(shard, "quarantined")).read_bytes()).ended
        for shard in sorted(board.quarantined)
    }
    return Status(workers, len(board.done), len(open_shards), quarantined)


def _owner(folder: Path, name: str) -> int:
    return Lease.decoded((folder / name).read_bytes()).worker


def _worker(path: Path, stale_after: float, shards: list[int], backups: list[int]) -> WorkerState:
    beat = json.loads(path.read_bytes())
    silent = max(0.0, time.time() - path.stat().st_mtime)
    if beat["ended"] is not None:
        attempt = beat.get("attempt", {})
        state = beat["ended"] if attempt.get("status") == "running" else attempt.get("status", "")
        state = state or beat["ended"]
    elif is_gone(beat):
        state = "gone"
    else:
        state = "silent" if silent > stale_after else "running"
    return WorkerState(beat, silent, state, shards, backups)
