"""A launcher's view of its job's folder, and the folder `OUT/logs/ray-…` that it makes there.

That folder holds the job file of the workers and what they print. A worker on another machine that
can read its job file there can also see the job's output folder.

Each worker rewrites a file of the folder `workers` every few seconds, its *heartbeat*, with the
figures of its progress. A shard on which workers crashed again and again is in *quarantine*: no
worker computes it any more.
"""

from __future__ import annotations

import shutil
import tempfile
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from batchgen.storage.leases.failure_detector import read_beat
from batchgen.storage.leases.folder_lock import FolderLock
from batchgen.storage.leases.job_files import LOGS
from batchgen.storage.leases.patience import patiently
from batchgen.storage.stores.metrics_file import METRICS, parse_metrics
from batchgen.util.errors import ConfigError

COMPLETE = (0, 3)
"""The exit codes of a complete job, and of a worker that has seen it complete."""
SPENT = 4
"""The exit code of a worker that stopped because the job's budget was spent."""


class LaunchedFolder:
    """A launcher's view of its job's folder.

    The launcher shares the folder's lock with the workers. So a worker that is started again joins
    the same session even if all others have ended meanwhile, and the job remembers on which shards
    workers crashed.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self._lock: FolderLock | None = None

    def hold(self) -> None:
        """Share the lock of the folder as soon as workers share it."""
        if self._lock is not None or not any((self.path / "workers").glob("*.json")):
            return
        try:
            lock = FolderLock(self.path / ".lock", join=True)
        except ConfigError:  # the first worker does not share the lock yet
            return
        if lock.exclusive:  # all workers have ended already
            lock.__exit__()
        else:
            self._lock = lock

    def release(self) -> None:
        """Give the lock back, if it is held."""
        if self._lock is not None:
            self._lock.__exit__()
            self._lock = None

    def beats(self) -> list[dict[str, Any]]:
        """The heartbeats of all workers; none once the job is complete."""
        beats = []
        for path in sorted((self.path / "workers").glob("[0-9]*.json")):
            try:
                beat = read_beat(patiently(path.read_bytes))
            except FileNotFoundError:  # the job is complete
                return []
            if beat is not None:
                beats.append(beat)
        return beats

    def is_complete(self) -> bool:
        """Whether the job is complete, by its metrics.json."""
        try:
            content = (self.path / METRICS).read_bytes()
        except FileNotFoundError:
            return False
        return bool(parse_metrics(content, str(self.path / METRICS))["status"] == "complete")

    def has_rows_of(self, process: tuple[str, int] | None) -> bool:
        """Whether a process, as its host and process id, had finished rows."""
        beats = [beat for beat in self.beats() if (beat["host"], beat["pid"]) == process]
        return any(beat["attempt"]["rows"] > 0 for beat in beats if "attempt" in beat)

    def has_quarantined(self) -> bool:
        """Whether shards of the job are in quarantine."""
        return any((self.path / "leases").glob("*.quarantined.json"))


def counted_rows(beats: Iterable[Mapping[str, Any]]) -> tuple[int, int | None]:
    """The number of finished rows over all heartbeats, and the number of all rows, if that is
    known."""
    with_totals = [beat for beat in beats if "totals" in beat]
    total = next((beat["attempt"]["rows_total"] for beat in with_totals), None)
    return sum(beat["totals"]["rows"] for beat in with_totals), total


def counted_errors(beats: Iterable[Mapping[str, Any]]) -> int:
    """The number of finished rows with an error, over all heartbeats."""
    return sum(beat["totals"]["error_rows"] for beat in beats if "totals" in beat)


def make_logs(out: Path, launcher: str) -> Path:
    """Make a new folder for the logs of one launch in a job's output folder, which is made if it is
    missing.

    Raises:
        ConfigError: the output folder cannot be written, or holds files that are not a job's.
    """
    # These load pyarrow, which the help on a launcher's keys need not wait for.
    from batchgen.storage.folder.refused_folder import refuse_foreign_files, unusable
    from batchgen.storage.stores.folder_storage import FolderStorage

    storage = FolderStorage(out)
    try:
        out.mkdir(parents=True, exist_ok=True)
        refuse_foreign_files(storage)
        (out / LOGS).mkdir(exist_ok=True)
        logs = Path(tempfile.mkdtemp(prefix=f"{launcher}-", dir=out / LOGS))
    except OSError as error:
        raise unusable(storage, error) from None
    return logs.absolute()


def remove_logs(logs: Path) -> None:
    """Delete the logs of a launch, once they are not needed any more."""
    shutil.rmtree(logs, ignore_errors=True)
    if not any(logs.parent.iterdir()):
        logs.parent.rmdir()
