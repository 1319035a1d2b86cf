"""The names of the files or objects through which workers coordinate, all below a job's folder."""

from __future__ import annotations

import re

LEASES, WORKERS, JOURNAL, DATA = "leases", "workers", "journal", "data"
FINISHED, BEGUN = ".journal", ".begun"
"""The suffixes of journal files with finished rows, and of those with begun rows."""
FINISH = -1
"""The number, in place of a shard's, of the lease for the work after all shards: grades, scores and
the card."""
SESSION = f"{LEASES}/session.json"
"""The object that identifies the workers that run at the same time. It exists until the job is
complete."""
INDEX, GRADING = -2, -3
"""The numbers, in place of a shard's, of two more leases: for the row index of rows that arrive
while the job runs; and for grading each shard as soon as it is published, for jobs that read this
one's rows."""
_NAMES = {FINISH: "finish", INDEX: "rows", GRADING: "grades"}
_LEASE = re.compile(r"([0-9]{5,}|finish|rows|grades)\.([eb])([0-9]{3,})\.json")
_MARK = re.compile(r"([0-9]{5,})\.(done|quarantined)\.json")
_WORKER = re.compile(r"([0-9]{4,})\.json")


def lease_name(shard: int, epoch: int, kind: str = "e") -> str:
    """The name of the lease of a shard (kind e) or of its backup copy (kind b) in an epoch; epochs
    count from 1."""
    return f"{LEASES}/{_shard(shard)}.{kind}{epoch:03d}.json"


def mark_name(shard: int, what: str) -> str:
    """The name of the mark that a shard is `done` or `quarantined`."""
    return f"{LEASES}/{_shard(shard)}.{what}.json"


def worker_name(number: int) -> str:
    """The name of a worker's heartbeat."""
    return f"{WORKERS}/{number:04d}.json"


def published_name(shard: int) -> str:
    """The name of a published shard."""
    return f"{DATA}/part-{shard:05d}.parquet"


def claim_name(shard: int) -> str:
    """The name of the claim on a shard that is to replace an older shard."""
    return f"{JOURNAL}/part-{shard:05d}.parquet.claim.tmp"


def journal_name(shard: int, worker: int) -> str:
    """The name, without its folder, of the file of a worker's finished rows of a shard."""
    return f"part-{shard:05d}.{worker:04d}{FINISHED}"


def parse_lease(name: str) -> tuple[int, str, int] | None:
    """Shard, kind and epoch of a lease; None for other names."""
    match = _LEASE.fullmatch(name)
    if match is None:
        return None
    named = {name: shard for shard, name in _NAMES.items()}
    shard = named[match[1]] if match[1] in named else int(match[1])
    return shard, match[2], int(match[3])


def parse_mark(name: str) -> tuple[int, str] | None:
    """Shard and meaning of a mark; None for other names."""
    match = _MARK.fullmatch(name)
    return None if match is None else (int(match[1]), match[2])


def parse_worker(name: str) -> int | None:
    """The number of the worker whose heartbeat has this name; None for other names."""
    match = _WORKER.fullmatch(name)
    return None if match is None else int(match[1])


def _shard(shard: int) -> str:
    return _NAMES.get(shard) or f"{shard:05d}"
