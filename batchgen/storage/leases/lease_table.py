"""The content of a lease, and a table of the state of all shards. `lease_protocol.py` reads
both."""

from __future__ import annotations

import json
from collections.abc import Iterable
from dataclasses import dataclass, field

from batchgen.storage.leases.lease_files import (
    parse_lease,
    parse_mark,
)


@dataclass(frozen=True)
class Lease:
    """The content of a lease.

    Attributes:
        worker: the worker that made it.
        ended: the workers whose crashes count for its shard.
    """

    worker: int
    ended: tuple[int, ...] = ()

    def encoded(self) -> bytes:
        return json.dumps({"worker": self.worker, "ended": list(self.ended)}).encode()

    @staticmethod
    def decoded(content: bytes | None) -> Lease | None:
        """Parse a lease.

        None if it cannot be read, so that its owner is unknown: it is not completely written yet,
        or its worker died or found the disk full while writing it.
        """
        try:
            values = json.loads(content or b"")
            return Lease(int(values["worker"]), tuple(map(int, values["ended"])))
        except (ValueError, TypeError, KeyError, RecursionError):
            return None


@dataclass
class LeaseTable:
    """The state of all shards, as the names in the folder `leases` show it.

    Attributes:
        epochs: shard → the highest epoch of its leases.
        backups: shard → the highest epoch of its backups.
        done: the shards that are published.
        quarantined: the shards that are in quarantine.
    """

    epochs: dict[int, int] = field(default_factory=dict)
    backups: dict[int, int] = field(default_factory=dict)
    done: set[int] = field(default_factory=set)
    quarantined: set[int] = field(default_factory=set)

    @staticmethod
    def of(names: Iterable[str]) -> LeaseTable:
        """The table of these names."""
        board = LeaseTable()
        board.add(names)
        return board

    def add(self, names: Iterable[str]) -> None:
        """Update the table with further names."""
        for name in names:
            if (lease := parse_lease(name)) is not None:
                shard, kind, epoch = lease
                highest = self.epochs if kind == "e" else self.backups
                highest[shard] = max(epoch, highest.get(shard, 0))
            elif (mark := parse_mark(name)) is not None:
                (self.done if mark[1] == "done" else self.quarantined).add(mark[0])
