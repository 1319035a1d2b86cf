"""A lock on a job's folder in an object store, where nothing releases it when a process ends.

`ObjectStorage.lock` takes it when a process opens the job.
"""

from __future__ import annotations

import json
import re
import threading
import time
import uuid

from batchgen.config.groups.workers_config import WorkersConfig
from batchgen.storage.leases.failure_detector import FailureDetector, any_lives, read_beat
from batchgen.storage.leases.job_files import LOCKS
from batchgen.storage.leases.object_store import ObjectStore
from batchgen.storage.leases.process_identity import is_gone, process_identity
from batchgen.util.errors import ConfigError, JobError, OpenedAnew

_NAME = re.compile(r"([0-9]{4,})\.json")
_SHARED, _RELEASED = "shared", "released"


class ObjectLock:
    """A lock for which each exclusive holder makes one object, such as `.locks/0003.json`.

    An exclusive holder rewrites its object again and again, until it shares the lock or releases
    it. From then on the heartbeats of the workers show whether the lock is held. When all workers
    are dead, the next holder makes the object with the next number.

    Two processes can come at the same time: one takes the lock because all workers are dead, and
    the other joins because a worker seemed to live. The first makes its object and then looks for
    workers; the second becomes a worker and then looks for the object (`confirm`). So at least one
    of them sees the other, and it is always the second that gives way.

    Attributes:
        exclusive: whether no other process holds the lock.
    """

    def __init__(self, store: ObjectStore, config: WorkersConfig, wait: float) -> None:
        """Take the lock exclusively, or share it if workers live; wait up to `wait` seconds.

        Raises:
            ConfigError: another process still holds it.
        """
        self._store = store
        self._config = config
        self._watch = FailureDetector(config.stale_after, time.monotonic, is_gone)
        self._about = {
            **process_identity(),
            "key": uuid.uuid4().hex,
            "since": time.strftime("%Y-%m-%d %H:%M:%S"),
        }
        self._beats = 0
        self._ends = threading.Event()
        self._writing = threading.Lock()
        self._thread = threading.Thread(target=self._beat, name="lock", daemon=True)
        self._number = 0
        self.exclusive = False
        self._take(time.monotonic() + wait + config.stale_after)

    def in_use(self) -> ConfigError:
        """The error for a process that may not share the folder with the lock's holders."""
        owner = "unknown"
        if about := read_beat(self._store.read(_name(self._newest()))):
            owner = f"pid {about.get('pid')} on {about.get('host')}, since {about.get('since')}"
        return ConfigError(
            f"output.dir={self._store.url} is in use by another job ({owner}): wait for it or stop "
            "it, or choose another output.dir"
        )

    def confirm(self) -> None:
        """Check that no process took the lock exclusively since this process took or joined it.

        Raises:
            OpenedAnew: another process did.
        """
        if self._newest() != self._number:
            raise OpenedAnew(
                f"{self._store.url}: another process has just opened the job; run the same "
                "command to join it"
            )

    def share(self) -> None:
        """Allow other processes to share the lock."""
        if self.exclusive:
            self.confirm()
            self._end(_SHARED)
            self.exclusive = False

    def __exit__(self, *_: object) -> None:
        if self.exclusive:
            self._end(_RELEASED)
            self.exclusive = False

    def _take(self, until: float) -> None:
        """Take or share the lock, or raise ConfigError at the time `until`."""
        while True:
            self._number = self._newest()
            content = self._store.read(_name(self._number)) if self._number else None
            if not content or self._watch.is_dead(self._number, content):
                if self._watch.how_ended(content) == _SHARED and self._workers_live():
                    return
                if self._store.create(_name(self._number + 1), self._content(None)):
                    self._number += 1
                    self.exclusive = True
                    self._thread.start()
                    self._become_alone(until)
                    return
            elif time.monotonic() >= until:
                raise self.in_use()
            else:
                time.sleep(self._pause)

    def _become_alone(self, until: float) -> None:
        """Wait until processes that are just joining give way; delete the objects of earlier
        holders."""
        try:
            while self._workers_live():
                if time.monotonic() >= until:
                    raise self.in_use()
                time.sleep(self._pause)
            self._store.delete([_name(n) for n in self._numbers() if n < self._number])
        except BaseException:
            self.__exit__()
            raise

    @property
    def _pause(self) -> float:
        return min(1.0, self._config.heartbeat / 5)

    def _workers_live(self) -> bool:
        return any_lives(self._store.do, self._pause, self._config.stale_after, here=True)

    def _numbers(self) -> list[int]:
        matches = map(_NAME.fullmatch, self._store.names(LOCKS))
        return [int(match[1]) for match in matches if match]

    def _newest(self) -> int:
        return max(self._numbers(), default=0)

    def _content(self, ended: str | None) -> bytes:
        self._beats += 1
        return json.dumps({**self._about, "beats": self._beats, "ended": ended}).encode()

    def _beat(self) -> None:
        while not self._ends.wait(self._config.heartbeat):
            with self._writing:
                if not self._ends.is_set():
                    try:
                        self._store.overwrite(_name(self._number), self._content(None))
                    except JobError:  # the next beat may succeed
                        continue

    def _end(self, how: str) -> None:
        with self._writing:
            self._ends.set()
            self._store.overwrite(_name(self._number), self._content(how))


def _name(number: int) -> str:
    return f"{LOCKS}/{number:04d}.json"
