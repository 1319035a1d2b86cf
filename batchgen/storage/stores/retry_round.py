"""Remembers, from one attempt to the next, which error rows are being computed again."""

from __future__ import annotations

import re
from collections.abc import Iterable
from pathlib import Path

from batchgen.storage.leases.fsync import fsync_path
from batchgen.storage.stores.folder_storage import FolderStorage
from batchgen.storage.stores.job_storage import Storage

_NAME = re.compile(r"part-([0-9]{5,})\.([0-9]{4,})\.retry")
_OPEN = "retry"


class RetryRound:
    """A round of `output.retry_errors=true`, in which each error row is computed again once.

    The round lasts until the job is complete, across kills. It is kept in the journal's folder as
    empty files. `part-00003.0006.retry` says that the error rows of shard 3 from before attempt 6
    are to be computed again; it is deleted just before the shard is published with its new rows.
    `retry`, written last when a round begins, says that every shard with errors has such a file,
    and makes it `is_open`.
    """

    def __init__(self, journal: Path, storage: Storage | None = None) -> None:
        """Read the round of a journal; without `storage` its folder is where it is."""
        self._storage = FolderStorage(journal.parent) if storage is None else storage
        self._journal = journal
        names = self._storage.names(journal)
        self.is_open = _OPEN in names
        matches = (_NAME.fullmatch(name) for name in names)
        self._before = {int(match[1]): int(match[2]) for match in matches if match}

    @property
    def least_attempt(self) -> int:
        """The lowest number that an attempt may have which goes on with the round."""
        return max(self._before.values(), default=1)

    def before(self, shard: int) -> int | None:
        """The attempt before which the errors of a shard are to be computed again, if they are."""
        return self._before.get(shard)

    def shards(self) -> set[int]:
        """The shards that have error rows which may be left to compute."""
        return set(self._before)

    def begin(self, shards: Iterable[int], attempt: int) -> None:
        """Begin a round that tries again the errors of these shards from before an attempt."""
        assert not self.is_open
        self.end()  # what a round has left that was killed while it began
        for shard in shards:
            self._before[shard] = attempt
            self._storage.mark(self._file(shard))
        fsync_path(self._journal)
        self._storage.mark(self._journal / _OPEN)
        self.is_open = True

    def finished(self, shard: int) -> None:
        """Forget a shard of which nothing is left to compute."""
        if shard in self._before:
            self._storage.delete(self._file(shard))  # or another worker was faster
            del self._before[shard]

    def end(self) -> None:
        """End the round; what are errors still may be tried in a next one."""
        self._storage.delete(self._journal / _OPEN)
        self.is_open = False
        for shard in self.shards():
            self.finished(shard)

    def _file(self, shard: int) -> Path:
        return self._journal / f"part-{shard:05d}.{self._before[shard]:04d}.retry"
