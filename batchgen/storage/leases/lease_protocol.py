"""The protocol by which workers share a job's shards. A store needs only create-if-absent for it.

- A worker gets its number by creating `workers/0007.json`. It rewrites that file again and again:
  its heartbeat. No other worker writes it.
- The owner of a shard is the worker that made the lease of the highest epoch, such as
  `leases/00012.e003.json`. Leases are never changed or deleted while workers run.
- If the owner of a lease is dead (`FailureDetector`), any worker may make the lease of the next
  epoch and continue from the journals. A worker that was only slow loses nothing but time, because
  two workers compute equal rows.
- A shard is published by create-if-absent and then marked as `done`. If a second worker publishes
  the same shard, it compares the two.
- If no shard is left to begin, a worker speculatively computes a shard that another worker has
  begun, from its last row backwards (a backup, lease `00012.b001.json`).
- The crash count of a shard is the number of workers that ended on it. A shard with a crash is
  computed without other rows, so that it is certain which shard caused the next crash. A shard with
  three crashes is put in quarantine.

Every function here is a generator of operations, which a store carries out (`store_operations.py`).
`jobs/generation/worker.py` runs them.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Literal

from batchgen.storage.leases.failure_detector import FailureDetector
from batchgen.storage.leases.lease_files import (
    JOURNAL,
    LEASES,
    WORKERS,
    claim_name,
    journal_name,
    lease_name,
    mark_name,
    parse_worker,
    published_name,
    worker_name,
)
from batchgen.storage.leases.lease_table import Lease, LeaseTable
from batchgen.storage.leases.store_operations import (
    Names,
    Overwrite,
    Payload,
    Read,
    Same,
    Steps,
    ask,
    create,
)

MOST_ENDED = 3
"""The number of crashes after which a shard is quarantined."""
_WIDEST = 256  # the most numbers or shards among which a worker draws after lost races
_MOST_ASKED = 16
"""The most owners whose heartbeats are checked in one call of `Member.look`."""


@dataclass(frozen=True)
class Task:
    """The next task of a worker.

    Attributes:
        kind: `shard`: compute the missing rows of a shard, from the first on. `backup`: compute
            those of a shard that another worker has begun, from the last row backwards. `wait`: ask
            again later. `over`: the job has no more tasks.
        shard: the shard; -1 without one.
        ended: the workers whose crashes count for the shard.
    """

    kind: Literal["shard", "backup", "wait", "over"]
    shard: int = -1
    ended: tuple[int, ...] = ()


def join_workers(
    min_number: int, content: Callable[[int], bytes], draw: Callable[[int], int]
) -> Steps[int]:
    """Register a new worker; return its number, which is above those of all present workers.

    Args:
        min_number: the least number that the worker may get.
        content: makes the first heartbeat for a number; it must be unique to this worker.
        draw: draws a random number below its argument, so that workers that join at the same time
            do not collide.
    """
    width = 1
    while True:
        names = yield from ask(Names(WORKERS))
        numbers = [number for name in names if (number := parse_worker(name)) is not None]
        number = max([min_number - 1, *numbers]) + 1 + draw(width)
        if (yield from create(worker_name(number), content(number))):
            return number
        width = min(4 * width, _WIDEST)


def publish_leased(shard: int, payload: Payload, worker: int, *, replaces: bool) -> Steps[bool]:
    """Publish a shard unless another worker has done so; return whether the published shard equals
    the payload.

    With `replaces`, the shard replaces an older one with fewer rows. Workers then agree on a claim
    first, because create-if-absent cannot replace an object.
    """
    name = claim_name(shard) if replaces else published_name(shard)
    if not (yield from create(name, payload)):
        if not (yield from ask(Same(name, payload))):
            return False
    if replaces:
        yield from ask(Overwrite(published_name(shard), payload))
    yield from create(mark_name(shard, "done"), Lease(worker).encoded())
    return True


class Member:
    """One worker's view of all workers: who owns which shard, and what this worker does next.

    Attributes:
        number: the number of this worker.
        num_shards: the number of shards of the job; None while it is not known.
        board: the leases when `look` was last called.
        complete: shards that this worker knows to be complete without looking.
        num_ready: the number of shards, from the first on, whose input rows have all arrived, while
            further rows still arrive; None if all rows have arrived.
    """

    def __init__(self, number: int, watch: FailureDetector, draw: Callable[[int], int]) -> None:
        self.number = number
        self.num_shards: int | None = None
        self.board = LeaseTable()
        self._names = frozenset[str]()  # at the last look
        self.complete: set[int] = set()
        self.num_ready: int | None = None
        self._watch = watch
        self._draw = draw
        self._leases: dict[tuple[int, str, int], Lease] = {}
        self._first = 0  # every shard before it is finished

    def look(self) -> Steps[None]:
        """List the leases and marks. Names from an earlier call are not parsed again, because there
        are two for each shard and a call for each shard."""
        names = frozenset((yield from ask(Names(LEASES))))
        if names >= self._names:
            self.board.add(names - self._names)
        else:  # leases have been deleted
            self.board = LeaseTable.of(names)
        self._names = names

    def is_finished(self, shard: int) -> bool:
        """Whether a shard is published, or in quarantine."""
        board = self.board
        return shard in self.complete or shard in board.done or shard in board.quarantined

    def is_over(self) -> bool:
        """Whether all shards were finished when `look` was last called."""
        if self.num_shards is None:
            return False
        while self._first < self.num_shards and self.is_finished(self._first):
            self._first += 1
        return self._first == self.num_shards

    def lost(self, shard: int) -> Steps[bool]:
        """Whether another worker had taken over a shard of this worker when `look` was last
        called."""
        epoch = self.board.epochs.get(shard, 0)
        if not epoch:
            return False
        lease = yield from self._lease(shard, "e", epoch)
        return lease is None or lease.worker != self.number

    def next_task(self, idle: bool) -> Steps[Task]:
        """Choose the next task, and make its lease.

        Only an `idle` worker, which has no row in flight, takes a shard with a crash or makes a
        backup.
        """
        yield from self.look()
        if (task := (yield from self._begin())) is not None:
            return task
        if self.is_over():
            return Task("over")
        running = []
        for shard in self._some_begun():
            lease = yield from self._lease(shard, "e", self.board.epochs[shard])
            if lease is not None and lease.worker == self.number:
                continue
            if not (yield from self._is_abandoned(shard, "e", self.board.epochs[shard])):
                running.append((shard, lease))
            elif (task := (yield from self._take_over(shard, lease, idle))) is not None:
                return task
        for shard, lease in running if idle else ():
            if lease is not None and not lease.ended and (yield from self._claim_backup(shard)):
                return Task("backup", shard)
        return Task("over" if self.is_over() else "wait")

    def claim(self, what: int) -> Steps[bool]:
        """Try to become the one worker that does a task for all: FINISH, INDEX or GRADING (see
        `lease_files.py`). Returns whether this worker does it."""
        yield from self.look()
        epoch = self.board.epochs.get(what, 0)
        if epoch:
            lease = yield from self._lease(what, "e", epoch)
            if lease is not None and lease.worker == self.number:
                return True
            if not (yield from self._is_abandoned(what, "e", epoch)):
                return False
        return (yield from self._make(what, "e", epoch + 1, Lease(self.number)))

    def is_dead(self, worker: int) -> Steps[bool]:
        """Whether a worker has ended, or is presumed dead."""
        content = yield from ask(Read(worker_name(worker)))
        return self._watch.is_dead(worker, content)

    def _some_begun(self) -> list[int]:
        """The shards that have been begun and are not finished. If they are many, it is a random
        part of them, so that many idle workers do not read all heartbeats again and again."""
        end = self._end
        begun = [
            shard
            for shard in sorted(self.board.epochs)
            if shard >= 0 and not self.is_finished(shard) and (end is None or shard < end)
        ]
        if len(begun) > _MOST_ASKED:
            start = self._draw(len(begun))
            begun = (begun[start:] + begun[:start])[:_MOST_ASKED]
        return begun

    @property
    def _end(self) -> int | None:
        """The number of shards that can be begun; None if it is not known."""
        return self.num_shards if self.num_ready is None else self.num_ready

    def _free(self) -> Iterator[int]:
        """The shards that no worker has begun, in order."""
        end = itertools.count() if self._end is None else range(self._end)
        for shard in itertools.islice(end, self._first, None):
            if shard not in self.board.epochs and not self.is_finished(shard):
                yield shard

    def _begin(self) -> Steps[Task | None]:
        """Take the first free shard. After each lost race, draw among more of the free shards."""
        self.is_over()  # updates `_first`
        width = 1
        while free := list(itertools.islice(self._free(), width)):
            shard = free[self._draw(len(free))]
            if (yield from self._make(shard, "e", 1, Lease(self.number))):
                return Task("shard", shard)
            yield from self.look()
            width = min(4 * width, _WIDEST)
        return None

    def _take_over(self, shard: int, lease: Lease | None, idle: bool) -> Steps[Task | None]:
        """Take over a shard of a dead worker, if that is allowed now."""
        ended = () if lease is None else lease.ended
        if lease is not None and (yield from self._is_to_blame(shard, lease.worker)):
            ended = (*ended, lease.worker)
        if len(ended) >= MOST_ENDED:
            mark = Lease(self.number, ended).encoded()
            yield from create(mark_name(shard, "quarantined"), mark)
            self.board.quarantined.add(shard)
            return None
        if ended and not idle:
            return None
        is_mine = yield from self._make(
            shard, "e", self.board.epochs[shard] + 1, Lease(self.number, ended)
        )
        return Task("shard", shard, ended) if is_mine else None

    def _is_to_blame(self, shard: int, worker: int) -> Steps[bool]:
        """Whether a dead worker counts as a crash of the shard: it failed, or it died without a
        report before it had finished one row of the shard."""
        how = self._watch.how_ended((yield from ask(Read(worker_name(worker)))))
        if how is not None:
            return how == "failed"
        return journal_name(shard, worker) not in (yield from ask(Names(JOURNAL)))

    def _claim_backup(self, shard: int) -> Steps[bool]:
        """Try to make the lease of a shard's backup copy; return whether this worker has it."""
        epoch = self.board.backups.get(shard, 0)
        if epoch:
            lease = yield from self._lease(shard, "b", epoch)
            if lease is not None and lease.worker == self.number:
                return False
            if not (yield from self._is_abandoned(shard, "b", epoch)):
                return False
        return (yield from self._make(shard, "b", epoch + 1, Lease(self.number)))

    def _make(self, shard: int, kind: str, epoch: int, lease: Lease) -> Steps[bool]:
        """Try to make a lease; return whether this worker made it."""
        is_mine = yield from create(lease_name(shard, epoch, kind), lease.encoded())
        if is_mine:
            self._leases[shard, kind, epoch] = lease
            highest = self.board.epochs if kind == "e" else self.board.backups
            highest[shard] = max(epoch, highest.get(shard, 0))
        return is_mine

    def _lease(self, shard: int, kind: str, epoch: int) -> Steps[Lease | None]:
        """Read an existing lease; None as in `Lease.decoded`. A lease does not change once it can
        be read, so it is read only once."""
        key = (shard, kind, epoch)
        if key not in self._leases:
            lease = Lease.decoded((yield from ask(Read(lease_name(shard, epoch, kind)))))
            if lease is None:
                return None
            self._leases[key] = lease
        return self._leases[key]

    def _is_abandoned(self, shard: int, kind: str, epoch: int) -> Steps[bool]:
        """Whether the worker of a lease is dead. A lease that names no worker is over if it has not
        changed for as long as a worker may be silent."""
        lease = yield from self._lease(shard, kind, epoch)
        if lease is not None:
            return (yield from self.is_dead(lease.worker))
        name = lease_name(shard, epoch, kind)
        return self._watch.stands_still(name, (yield from ask(Read(name))))
