"""This process as one of the workers of a job: its heartbeat, its leases, its next shard.

It runs `storage/leases/lease_protocol.py` over the job's storage.
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

_OLDER = f"{LEASES}/older.json"
_TAIL = 5
"""The factor by which a worker reads the others' progress more often when no shard is left to
begin."""
How = Literal["complete", "stopped", "failed"]


class Worker:
    """A worker: its number, its heartbeat, its leases, and its view of the others. `session` is a
    text that is equal for all workers that run at the same time."""

    def __init__(
        self,
        folder: Path,
        config: WorkersConfig,
        min_number: int,
        storage: Storage | None = None,
        *,
        joins: bool = False,
    ) -> None:
        """Become a worker with a number of at least `min_number`; make the folders unless it
        `joins` others.

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
        self._in_tail = False
        self._saw_gone: float | None = None
        self.store.do(Create(SESSION, json.dumps(key).encode()))
        session = self.store.do(Read(SESSION)) or b'""'
        self.store.fence(session)
        self.session: str = json.loads(session)

    def end(self, how: How | None) -> None:
        """Tell the others that this worker has ended, and how; None if there are no others left."""
        self._heartbeat.end(how)

    def begin(
        self, complete: set[int], num_shards: int | None, num_ready: int | None = None
    ) -> None:
        """Learn which shards are complete, how many there are, if that is known, and how many can
        be begun, if those are not all."""
        self._member.complete |= complete
        self._member.num_shards, self._member.num_ready = num_shards, num_ready

    @property
    def num_shards(self) -> int | None:
        return self._member.num_shards

    def look(self) -> None:
        """Read the progress of the others, if it is time to."""
        self._next_look = time.monotonic() + self.look_seconds
        try:
            self._do(self._member.look())
        except FolderGone:
            self._see_complete()

    @property
    def look_seconds(self) -> float:
        """The seconds between two calls of `look` that read the others' progress."""
        return self._config.heartbeat / (_TAIL if self._in_tail else 1)

    def is_time_to_look(self) -> bool:
        return time.monotonic() >= self._next_look

    def next_task(self, idle: bool) -> Task:
        """The next task, see `Member.next_task`."""
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
        return self._member.is_finished(shard)

    def is_shared(self, shard: int) -> bool:
        """Whether another worker may compute rows of a shard of this worker's."""
        board = self._member.board
        try:
            return shard in board.backups or self._do(self._member.lost(shard))
        except FolderGone:
            return True

    def has_completed(self, shard: int) -> None:
        """Note that this worker has nothing left to do in a shard."""
        self._member.complete.add(shard)

    def quarantined(self) -> dict[int, tuple[int, ...]]:
        """The shards in quarantine, each with the workers that crashed on it."""
        workers = {}
        for shard in sorted(self._member.board.quarantined):
            content = self.store.do(Read(mark_name(shard, "quarantined")))
            if content is not None:
                lease = Lease.decoded(content)
                workers[shard] = () if lease is None else lease.ended
        return workers

    def publish(self, shard: int, file: Path | None, replaces: bool) -> bool:
        """See `shards.publisher.Publish`."""
        try:
            if file is None:
                self.store.do(Create(mark_name(shard, "done"), Lease(self.number).encoded()))
                return True
            return self._do(publish_leased(shard, file, self.number, replaces=replaces))
        except FolderGone:  # the job was completed without this worker
            return True

    def claim_finish(self) -> bool:
        """Try to become the worker that grades, scores and completes the job; return whether it is.

        If the leases are gone, another worker has completed it. That worker writes metrics.json
        once more, over what others have written late. If it was killed before, as is supposed
        after `workers.stale_after` seconds, it is this worker that completes the job again.
        """
        try:
            return self._do(self._member.claim(FINISH))
        except FolderGone:
            self._confirm_job()
            now = time.monotonic()
            self._saw_gone = self._saw_gone or now
            return now - self._saw_gone >= self._config.stale_after

    def claim(self, what: int) -> bool:
        """Whether it is this worker that makes the row index (INDEX) or grades shards at once
        (GRADING), for as long as it lives."""
        try:
            return self._do(self._member.claim(what))
        except FolderGone:
            return False

    def tell(self, facts: Mapping[str, Any]) -> None:
        """Put these facts into the heartbeat, where the others read them."""
        self._heartbeat.facts = facts

    def beat(self) -> None:
        """Write the heartbeat at once."""
        self._heartbeat.beat()

    def tell_older(self, older: ResumeState) -> None:
        """Tell workers that join later which rows this worker, the first one, found finished."""
        self.store.do(Overwrite(_OLDER, older.encoded()))

    def older(self) -> ResumeState:
        """The rows that the first worker found finished. Raises FolderGone if the job was completed
        meanwhile."""
        content = self.store.do(Read(_OLDER))
        if content is None:
            raise FolderGone(_OLDER)
        return ResumeState.decoded(content)

    def is_first(self) -> bool:
        """Whether all workers with a lower number are dead. The first one writes metrics.json."""
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
        """The last heartbeats of all other workers; `dead` says whether the worker is dead."""
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
        """The folder of leases is deleted when the job is complete."""
        self._confirm_job()
        shards = self._member.num_shards
        self._member.complete |= set(range(shards)) if shards is not None else set()

    def _confirm_job(self) -> None:
        """Raise FolderLost if the job was deleted, after its leases were found gone."""
        if not self._storage.exists(self._storage.path / "manifest.json"):
            raise lost(self._storage.display_name)

    def _do(self, steps: Steps[T]) -> T:
        return carry_out(steps, self.store.do)


def others_run(folder: Path, config: WorkersConfig) -> bool:
    """Whether a worker on another machine, which the lock may not reach, runs on a folder."""
    if not (folder / WORKERS).is_dir():
        return False
    store = FileStore(folder, "")
    return any_lives(store.do, config.heartbeat / _TAIL, config.stale_after, here=False)
