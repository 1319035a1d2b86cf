"""A model of a job's workers: the protocol itself over a store in memory, step by step.

A worker is a generator. Whoever runs the model decides after each of its operations which worker
goes on, and may kill it, keep it waiting, or leave its operation unanswered.
"""

from __future__ import annotations

import json
from collections.abc import Generator
from dataclasses import dataclass, field
from random import Random
from typing import Any

from batchgen.storage.leases.failure_detector import FailureDetector
from batchgen.storage.leases.lease_files import (
    JOURNAL,
    journal_name,
    published_name,
    worker_name,
)
from batchgen.storage.leases.lease_protocol import Member, join_workers, publish_leased
from batchgen.storage.leases.store_operations import (
    Create,
    Names,
    Overwrite,
    Read,
    Same,
    Steps,
    Unanswered,
    ask,
)

ROWS = 3  # in each shard
STALE = 10.0


@dataclass(frozen=True)
class Append:
    """Write a finished row to the end of the worker's own journal file."""

    name: str
    row: int


@dataclass(frozen=True)
class Delete:
    name: str


@dataclass
class MemoryStore:
    """Objects in memory.

    Attributes:
        acknowledged: (shard, row) of rows whose worker knows that they are in a journal.
    """

    objects: dict[str, bytes] = field(default_factory=dict)
    acknowledged: set[tuple[int, int]] = field(default_factory=set)
    created: list[str] = field(default_factory=list)

    def do(self, operation: Any) -> Any:
        objects = self.objects
        match operation:
            case Create(name, payload):
                if name in objects:
                    return False
                assert isinstance(payload, bytes)
                objects[name] = payload
                self.created.append(name)
                return True
            case Overwrite(name, payload):
                assert isinstance(payload, bytes)
                objects[name] = payload
            case Read(name):
                return objects.get(name)
            case Same(name, payload):
                return objects.get(name) == payload
            case Names(folder):
                start = f"{folder}/"
                return [name[len(start) :] for name in objects if name.startswith(start)]
            case Append(name, row):
                objects[name] = objects.get(name, b"") + bytes([row])
            case Delete(name):
                objects.pop(name, None)
        return None

    def rows(self, shard: int) -> set[int]:
        """The rows of a shard in its journals and in what is published."""
        found = set(self.objects.get(published_name(shard), b""))
        for name, content in self.objects.items():
            if name.startswith(f"{JOURNAL}/part-{shard:05d}.") and name.endswith(".journal"):
                found |= set(content)
        return found


def whole(shard: int) -> bytes:
    """A shard with all its rows."""
    return bytes(range(ROWS))


@dataclass
class Worker:
    """A worker that lives in the model.

    Attributes:
        clock: its own seconds.
        poison: a row that ends each worker that computes it, as (shard, row).
        computed: the rows that it has finished.
        ended: how it ended; None while it lives.
    """

    store: MemoryStore
    shards: int
    seed: int = 0
    poison: tuple[int, int] | None = None
    clock: float = 0.0
    number: int = 0
    ended: str | None = None
    computed: list[tuple[int, int]] = field(default_factory=list)
    beats: int = 0

    def __post_init__(self) -> None:
        self._random = Random(self.seed)
        self._steps = self._life()
        self._operation: Any = None
        self._is_new = True
        self._is_torn = False

    def step(self, fault: str | None = None) -> None:
        """Let the worker do its next operation.

        Args:
            fault: "before" or "after": the operation does not happen, or does, and the worker is
                not told. "torn": of what it makes only a part is there until its next step, as on
                a file system without links.
        """
        assert self.ended is None
        try:
            if self._is_new:
                self._is_new = False
                self._operation = next(self._steps)
            if self._is_torn:
                self._is_torn, answer = False, True
                self.store.objects[self._operation.name] = self._operation.payload
            elif fault == "torn":
                answer = self._tear()
                if self._is_torn:
                    return
            elif fault != "before":
                answer = self.store.do(self._operation)
            if fault in ("before", "after"):
                self._operation = self._steps.throw(Unanswered())
            else:
                self._operation = self._steps.send(answer)
        except StopIteration as end:
            self.ended = end.value
            self.beat()

    def _tear(self) -> Any:
        """Do the operation, but if it makes a lease or a heartbeat, begin it only."""
        answer = self.store.do(self._operation)
        if isinstance(self._operation, Create) and answer and "data" not in self._operation.name:
            content = self.store.objects[self._operation.name]
            part = self._random.choice([b"", content[:9], bytes(len(content))])
            self.store.objects[self._operation.name] = part
            self._is_torn = True
        return answer

    def beat(self) -> None:
        """The heartbeat, which a thread of the worker writes."""
        if self.number:
            self.beats += 1
            self.store.do(Overwrite(worker_name(self.number), self._content(self.number)))

    def _content(self, number: int) -> bytes:
        beat = {"worker": number, "beats": self.beats, "seed": self.seed, "ended": self.ended}
        return json.dumps(beat).encode()

    def _life(self) -> Generator[Any, Any, str]:
        self.number = yield from join_workers(1, self._content, self._random.randrange)
        watch = FailureDetector(STALE, lambda: self.clock, lambda beat: False)
        member = Member(self.number, watch, self._random.randrange)
        member.num_shards = self.shards
        while True:
            task = yield from member.next_task(idle=True)
            if task.kind == "over":
                return "complete"
            if task.kind == "wait":
                self.clock += 1.0
                continue
            rows = range(ROWS) if task.kind == "shard" else reversed(range(ROWS))
            shard = task.shard
            for row in rows:
                if row not in (yield from self._found(shard)):
                    if (shard, row) == self.poison:
                        return "failed"
                    self.computed.append((shard, row))
                    name = f"{JOURNAL}/{journal_name(shard, self.number)}"
                    yield from ask(Append(name, row))  # type: ignore[arg-type]
                    self.store.acknowledged.add((shard, row))
            if len((yield from self._found(shard))) == ROWS:
                same = yield from publish_leased(shard, whole(shard), self.number, replaces=False)
                assert same
                for name in (yield from self._journals(shard)):
                    yield from ask(Delete(name))  # type: ignore[arg-type]
                member.complete.add(shard)

    def _journals(self, shard: int) -> Steps[list[str]]:
        names = yield from ask(Names(JOURNAL))
        return [f"{JOURNAL}/{n}" for n in names if n.startswith(f"part-{shard:05d}.")]

    def _found(self, shard: int) -> Steps[set[int]]:
        """The rows of a shard that are finished, read one file after the other."""
        names = yield from self._journals(shard)
        found: set[int] = set()
        for name in names:
            found |= set((yield from ask(Read(name))) or b"")
        return found | set((yield from ask(Read(published_name(shard)))) or b"")
