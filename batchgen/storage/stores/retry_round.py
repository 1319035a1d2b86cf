"""Remembers, from one attempt to the next, which error rows are being computed again
(`output.retry_errors`). `OutputWriter` begins a round, and `Publisher` ends it shard by shard."""

from __future__ import annotations

import re
from collections.abc import Iterable
from pathlib import Path

from batchgen.storage.leases.fsync import fsync_path
from batchgen.storage.stores.folder_storage import FolderStorage
from batchgen.storage.stores.job_storage import Storage
from batchgen.util.errors import ConfigError

_NAME = re.compile(r"part-([0-9]{5,})\.([0-9]{4,})\.retry")
_OPEN = "retry"


class RetryRound:
    """A round of `output.retry_errors=true`, in which each error row is computed again once.

    The round lasts until the job is complete, across kills. It is kept in the journal's folder as
    empty files. `part-00003.0006.retry` means that the error rows of shard 3 from before attempt 6
    are to be computed again; the file is deleted just before the shard is published with its new
    rows. `retry` is written last when a round begins. It means that every shard with errors has
    such a file.

    Attributes:
        is_open: whether a round has begun and not ended.
    """

    def __init__(self, journal: Path, storage: Storage | None = None) -> None:
        """Read the round in the folder of a journal. `storage` defaults to the folder around it."""
        self._storage = FolderStorage(journal.parent) if storage is None else storage
        self._journal = journal
        names = self._storage.names(journal)
        self.is_open = _OPEN in names
        matches = (_NAME.fullmatch(name) for name in names)
        self._before = {int(match[1]): int(match[2]) for match in matches if match}

    @property
    def least_attempt(self) -> int:
        """The lowest number that an attempt may have which continues the round."""
        return max(self._before.values(), default=1)

    def before(self, shard: int) -> int | None:
        """The attempt before which the errors of a shard are to be computed again; None if they are
        not."""
        return self._before.get(shard)

    def shards(self) -> set[int]:
        """The shards that may have error rows left to compute."""
        return set(self._before)

    def begin(self, shards: Iterable[int], attempt: int) -> None:
        """Begin a round in which the errors of these shards from before the `attempt` are computed
        again."""
        assert not self.is_open
        self.end()  # removes the files of a round that was killed while it began
        for shard in shards:
            self._before[shard] = attempt
            self._storage.mark(self._file(shard))
        fsync_path(self._journal)
        self._storage.mark(self._journal / _OPEN)
        self.is_open = True

    def finished(self, shard: int) -> None:
        """Forget a shard in which nothing is left to compute."""
        if shard in self._before:
            self._storage.delete(self._file(shard))
            del self._before[shard]

    def end(self) -> None:
        """End the round. Rows that still have errors may be computed in another round."""
        self._storage.delete(self._journal / _OPEN)
        self.is_open = False
        for shard in self.shards():
            self.finished(shard)

    def check(self, retry_errors: bool) -> None:
        """Check that this worker has the `retry_errors` of the workers that run.

        Raises:
            ConfigError: it has not.
        """
        if retry_errors != self.is_open:
            raise ConfigError(
                f"output.retry_errors={str(retry_errors).lower()}: the workers that run in "
                f"{self._storage.display_name} use another value: wait for them or stop them "
                "first"
            )

    def _file(self, shard: int) -> Path:
        return self._journal / f"part-{shard:05d}.{self._before[shard]:04d}.retry"
