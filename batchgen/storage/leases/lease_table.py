"""What a lease says, and what the names of all leases and marks say together."""

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
    """What a lease says: the worker that made it, and the workers whose crash is counted for its
    shard."""

    worker: int
    ended: tuple[int, ...] = ()

    def encoded(self) -> bytes:
        return json.dumps({"worker": self.worker, "ended": list(self.ended)}).encode()

    @staticmethod
    def decoded(content: bytes | None) -> Lease | None:
        """What a lease says. None if nothing can be read of it, so that nobody knows whose it is:
        it is not whole yet, or its worker died or found the disk full before it was."""
        try:
            values = json.loads(content or b"")
            return Lease(int(values["worker"]), tuple(map(int, values["ended"])))
        except (ValueError, TypeError, KeyError, RecursionError):
            return None


@dataclass
class LeaseTable:
    """What the names in `leases` say.

    Attributes:
        epochs: shard → the highest epoch of its leases.
        backups: shard → the highest epoch of its backups.
    """

    epochs: dict[int, int] = field(default_factory=dict)
    backups: dict[int, int] = field(default_factory=dict)
    done: set[int] = field(default_factory=set)
    quarantined: set[int] = field(default_factory=set)

    @staticmethod
    def of(names: Iterable[str]) -> LeaseTable:
        board = LeaseTable()
        board.add(names)
        return board

    def add(self, names: Iterable[str]) -> None:
        """Take in what further names say."""
        for name in names:
            if (lease := parse_lease(name)) is not None:
                shard, kind, epoch = lease
                highest = self.epochs if kind == "e" else self.backups
                highest[shard] = max(epoch, highest.get(shard, 0))
            elif (mark := parse_mark(name)) is not None:
                (self.done if mark[1] == "done" else self.quarantined).add(mark[0])
