"""This process as one of the workers of a job: its heartbeat, its leases, its next shard.

Several processes, the *workers*, may compute one job. They divide its shards between them through
files in the job's folder: a *lease* says which worker computes a shard, and a *heartbeat* (a file
that a worker rewrites every few seconds) shows that it is alive.

`Worker` runs the protocol of `storage/leases/lease_protocol.py` on the job's storage. `ShardQueue`
asks it for shards, and the job's end for the right to complete the job.
"""

from __future__ import annotations

import json
import time
import uuid
from collections.abc import Mapping
from pathlib import Path
from secrets import randbelow
from typing import Any, Literal

from batchgen.config.groups.workers_config import WorkersConfig
from batchgen.storage.leases.failure_detector import FailureDetector, any_lives, read_beat
from batchgen.storage.leases.file_store import FileStore, FolderGone
from batchgen.storage.leases.folder_lock import lost
from batchgen.storage.leases.heartbeat import Heartbeat, encoded
from batchgen.storage.leases.lease_files import (
    FINISH,
    LEASES,
    SESSION,
    WORKERS,
    mark_name,
    parse_worker,
    worker_name,
)
from batchgen.storage.leases.lease_protocol import Member, Task, join_workers, publish_leased
from batchgen.storage.leases.lease_table import Lease
from batchgen.storage.leases.process_identity import is_gone, process_identity
from batchgen.storage.leases.store_operations import (
    Create,
    Names,
    Overwrite,
    Read,
    Steps,
    T,
    carry_out,
)
from batchgen.storage.shards.shard_files import ResumeState
from batchgen.storage.stores.folder_storage import FolderStorage
from batchgen.storage.stores.job_storage import Storage

_OLDER = f"{LEASES}/older.json"  # the rows that the first worker found finished
_TAIL = 5
"""A worker reads the others' progress this many times as often when no shard is left to begin."""
How = Literal["complete", "stopped", "failed"]
"""How a worker ended."""


class Worker:
    """A worker of a job: its number, its heartbeat, its leases, and what it knows of the others.

    Attributes:
        number: the number of the worker among all that the job has had.
        store: the files of the protocol.
        session: a text that is equal for all workers that run at the same time.
    """

    def __init__(
        self,
        folder: Path,
        config: WorkersConfig,
        min_number: int,
        storage: Storage | None = None,
        *,
        joins: bool = False,
    ) -> None:
        """Become a worker with a number of at least `min_number`. Make the folders of the protocol,
        unless this worker `joins` others.

        Raises:
            FolderGone: the workers that this one was to join have completed the job.
            JobError: the folder cannot be written.
        """
        key = uuid.uuid4().hex
        self._storage = storage or FolderStorage(folder)
        self.store = self._storage.store(key, joins=joins)
        about = {**process_identity(), "name": config.name, "key": key}
        self._config = config
        self._watch = FailureDetector(config.stale_after, time.monotonic, is_gone)
        self.number = self._do(
            join_workers(min_number, lambda number: encoded(about, number, 0, None, {}), randbelow)
        )
        self._member = Member(self.number, self._watch, randbelow)
        self._heartbeat = Heartbeat(self.number, config.heartbeat, about, self.store.do)
        self._heartbeat.start()
        self._next_look = 0.0
        self._gone: set[int] = set()
        self._in_tail = False  # no shard is left to begin
        self._saw_gone: float | None = None  # when the leases were first seen to be gone
        self.store.do(Create(SESSION, json.dumps(key).encode()))
        session = self.store.do(Read(SESSION)) or b'""'
        self.store.fence(session)  # an object store then refuses what another session wrote
        self.session: str = json.loads(session)

    def end(self, how: How | None) -> None:
        """Report to the other workers that this one has ended, and `how`. None: no other worker is
        left."""
        self._heartbeat.end(how)

    def begin(
        self, complete: set[int], num_shards: int | None, num_ready: int | None = None
    ) -> None:
        """Note which shards are complete.

        Args:
            num_shards: the number of all shards; None if it is not known.
            num_ready: the number of shards that can begin; None if all can.
        """
        self._member.complete |= complete
        self._member.num_shards, self._member.num_ready = num_shards, num_ready

    @property
    def num_shards(self) -> int | None:
        """The number of shards of the job; None if it is not known yet."""
        return self._member.num_shards

    def look(self) -> None:
        """Read the progress of the other workers."""
        self._next_look = time.monotonic() + self.look_seconds
        try:
            self._do(self._member.look())
        except FolderGone:
            self._see_complete()

    @property
    def look_seconds(self) -> float:
        """The seconds between two reads of the other workers' progress."""
        return self._config.heartbeat / (_TAIL if self._in_tail else 1)

    def is_time_to_look(self) -> bool:
        """Whether it is time to call `look`."""
        return time.monotonic() >= self._next_look

    def next_task(self, idle: bool) -> Task:
        """What to do next, see `Member.next_task`. `idle` says that no row of this worker is in
        flight."""
        self._next_look = time.monotonic() + self.look_seconds
        try:
            task = self._do(self._member.next_task(idle))
        except FolderGone:
            self._see_complete()
            return Task("over")
        self._in_tail = task.kind != "shard"
        return task

    def is_over(self) -> bool:
        """Whether all shards are finished, as far as this worker has seen."""
        return self._member.is_over()

    def is_finished(self, shard: int) -> bool:
        """Whether a shard is finished, as far as this worker has seen."""
        return self._member.is_finished(shard)

    def is_shared(self, shard: int) -> bool:
        """Whether another worker may compute rows of one of this worker's shards."""
        board = self._member.board
        try:
            return shard in board.backups or self._do(self._member.lost(shard))
        except FolderGone:
            return True

    def has_completed(self, shard: int) -> None:
        """Note that this worker has nothing left to do in a shard."""
        self._member.complete.add(shard)

    def quarantined(self) -> dict[int, tuple[int, ...]]:
        """The shards in quarantine, each with the numbers of the workers that crashed on it."""
        workers = {}
        for shard in sorted(self._member.board.quarantined):
            content = self.store.do(Read(mark_name(shard, "quarantined")))
            if content is not None:
                lease = Lease.decoded(content)
                workers[shard] = () if lease is None else lease.ended
        return workers

    def publish(self, shard: int, file: Path | None, *, replaces: bool) -> bool:
        """Publish a shard's file under this worker's lease; see `shards.publisher.Publish`."""
        if file is None:
            self.store.do(Create(mark_name(shard, "done"), Lease(self.number).encoded()))
            return True
        return self._do(publish_leased(shard, file, self.number, replaces=replaces))

    def claim_finish(self) -> bool:
        """Try to become the worker that grades, scores and completes the job; return whether it is.

        If the leases are gone, another worker has completed the job. That worker writes
        metrics.json a last time, after reports that other workers wrote late. If it has not done so
        after `workers.stale_after` seconds, it is taken to be dead, and this worker completes the
        job again.
        """
        try:
            return self._do(self._member.claim(FINISH))
        except FolderGone:
            self._confirm_job()
            now = time.monotonic()
            self._saw_gone = self._saw_gone or now
            return now - self._saw_gone >= self._config.stale_after

    def claim(self, what: int) -> bool:
        """Whether this worker has a duty that only one living worker has: to make the row index
        (INDEX), or to grade shards while the job runs (GRADING)."""
        try:
            return self._do(self._member.claim(what))
        except FolderGone:
            return False

    def tell(self, facts: Mapping[str, Any]) -> None:
        """Put facts into the heartbeat, where the other workers read them."""
        self._heartbeat.facts = facts

    def beat(self) -> None:
        """Write the heartbeat now."""
        self._heartbeat.beat()

    def tell_older(self, older: ResumeState) -> None:
        """Record for workers that join later which rows this worker, the first one, found
        finished."""
        self.store.do(Overwrite(_OLDER, older.encoded()))

    def older(self) -> ResumeState:
        """Read which rows the first worker found finished.

        Raises:
            FolderGone: the job was completed meanwhile.
        """
        content = self.store.do(Read(_OLDER))
        if content is None:
            raise FolderGone(_OLDER)
        return ResumeState.decoded(content)

    def is_first(self) -> bool:
        """Whether all workers with a lower number are dead. The first worker writes
        metrics.json."""
        numbers = self._numbers()
        if self.number not in numbers:  # the job was completed without this worker
            return False
        for number in numbers:
            if number < self.number and number not in self._gone:
                if not self._do(self._member.is_dead(number)):
                    return False
                self._gone.add(number)
        return True

    def others(self) -> list[dict[str, Any]]:
        """The last heartbeats of all other workers; `dead` says whether a worker is dead."""
        beats = []
        for number in self._numbers():
            content = self.store.do(Read(worker_name(number)))
            beat = read_beat(content)
            if number != self.number and beat is not None:
                beats.append({**beat, "dead": self._watch.is_dead(number, content)})
        return beats

    def _numbers(self) -> list[int]:
        try:
            names = self.store.do(Names(WORKERS))
        except FolderGone:
            return []
        return sorted(number for name in names if (number := parse_worker(name)) is not None)

    def _see_complete(self) -> None:
        """Note that the job is complete, because its folder of leases was deleted."""
        self._confirm_job()
        shards = self._member.num_shards
        self._member.complete |= set(range(shards)) if shards is not None else set()

    def _confirm_job(self) -> None:
        """Raise FolderLost if the job was deleted. Called when its leases are gone."""
        if not self._storage.exists(self._storage.path / "manifest.json"):
            raise lost(self._storage.display_name)

    def _do(self, steps: Steps[T]) -> T:
        return carry_out(steps, self.store.do)


def others_run(folder: Path, config: WorkersConfig) -> bool:
    """Whether a worker on another machine, whose lock this machine may not see, runs on a
    folder."""
    if not (folder / WORKERS).is_dir():
        return False
    store = FileStore(folder, "")
    return any_lives(store.do, config.heartbeat / _TAIL, config.stale_after, here=False)
