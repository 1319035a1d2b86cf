"""Makes shards from complete journals and gives them their names, in a thread. `OutputWriter`
submits them."""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Collection, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Protocol

from batchgen.storage.leases.file_store import FolderGone
from batchgen.storage.shards.journal import read_file
from batchgen.storage.shards.output_schema import OutputSchema
from batchgen.storage.shards.shard_files import (
    mapped_shard,
    publish_shard,
    same_shard_bits,
    shard_path,
    write_shard,
)
from batchgen.storage.stores.job_storage import Storage
from batchgen.storage.stores.retry_round import RetryRound
from batchgen.util.errors import JobError


class Publish(Protocol):
    """A function that gives a shard its name."""

    def __call__(self, shard: int, file: Path | None, *, replaces: bool) -> bool:
        """Give the shard with this number its name.

        Args:
            shard: the shard's number.
            file: the shard's file, under a temporary name. None if the shard is already published;
                then the function only notes that nothing is left to do.
            replaces: whether the file replaces an older shard.

        Returns:
            Whether the published shard equals the file.

        Raises:
            FolderGone: other workers have completed the job.
        """
        ...


class Publisher:
    """Publishes, in a thread, the shards that one worker has completed.

    Attributes:
        exact: whether a row that was computed twice must have equal bits.
        by_schedule: the names of columns that need not be equal in any case.
        skipped: the shards that another worker must have published, because their journal files,
            the journal's folder or the leases are gone.
    """

    def __init__(
        self,
        data: Path,
        journal: Path,
        schema: OutputSchema,
        retry_round: RetryRound,
        worker: int,
        publish: Publish | None,
        storage: Storage,
    ) -> None:
        """Create a publisher.

        Args:
            data, journal: the folders of shards and of journal files.
            retry_round: the shards whose error rows are being computed again.
            worker: the number of this worker.
            publish: gives shards their names; None renames files.
        """
        self.exact = True
        self.by_schedule: Collection[str] = ()
        self.skipped: set[int] = set()
        self._data = data
        self._temporary = journal  # where files with temporary names are written
        self._schema = schema
        self._round = retry_round
        self._worker = worker
        self._storage = storage
        self._name_file: Publish = publish or self._rename
        self._thread = ThreadPoolExecutor(max_workers=1, thread_name_prefix="publish")
        self._publishing: list[Future[None]] = []

    def close(self) -> None:
        self._thread.shutdown()

    def submit(self, number: int, files: Sequence[Path], rows: int, *, replaces: bool) -> None:
        """Publish a shard with `rows` output rows from journal files, later.

        If it `replaces` an older shard, rows of that shard stay unless they are in the files. A
        shard that another worker has published meanwhile is complete, and is not merged.
        """
        self._publishing.append(self._thread.submit(self._publish, number, files, rows, replaces))

    def note_complete(self, number: int) -> None:
        """Note that a published shard needs no change."""
        with contextlib.suppress(FolderGone):
            self._name_file(number, None, replaces=False)

    def wait(self, limit: int) -> None:
        """Wait until at most `limit` shards are being published. Raises the thread's errors."""
        while self._publishing and (len(self._publishing) > limit or self._publishing[0].done()):
            self._publishing.pop(0).result()

    def _publish(self, number: int, files: Sequence[Path], rows: int, replaces: bool) -> None:
        try:
            self._merge(number, files, rows, replaces)
        except FolderGone:
            self.skipped.add(number)
        except (FileNotFoundError, JobError):
            # If other workers have completed the job while this process was paused, the folder of
            # the journal is deleted, and this shard is published.
            if self._temporary.exists():
                raise
            self.skipped.add(number)

    def _merge(self, number: int, files: Sequence[Path], rows: int, replaces: bool) -> None:
        """Write the shard's file, give it its name, and delete the journal files. Raises FolderGone
        if the leases are gone; the journal then stays."""
        path = shard_path(self._data, number)
        temporary = self._temporary / f"{path.name}.{self._worker}.tmp"
        copy = self._temporary / f"{path.name}.{self._worker}.old.tmp"
        try:
            source = self._storage.parquet(path)
            batches = mapped_shard(source, self._schema, copy) if replaces else []
            for file in files:
                self._storage.download(file)
                batches += read_file(file, self._schema.arrow)
        except FileNotFoundError:
            # Another worker has published the shard and deletes its journal files.
            copy.unlink(missing_ok=True)
            self.skipped.add(number)
            return
        count = write_shard(batches, self._schema, path, temporary)
        if count != rows:  # never publish fewer rows than are known to be finished
            raise JobError(
                f"{path.name} would have {count:,} rows and must have {rows:,}: its journal files "
                f"{', '.join(file.name for file in files)} have changed; run the same command again"
            )
        # Before the shard gets its name: a kill in between would otherwise make the next attempt
        # compute the errors again that were just computed again.
        self._round.finished(number)
        same = self._name_file(number, temporary, replaces=replaces)
        copy.unlink(missing_ok=True)
        if not same:
            self._keep(temporary, path)
        temporary.unlink(missing_ok=True)
        self._delete(files)

    def _delete(self, files: Sequence[Path]) -> None:
        """Delete journal files, of which others may have deleted some."""
        for file in files:
            self._storage.delete(file)

    def _rename(self, shard: int, file: Path | None, *, replaces: bool) -> bool:
        """Publish without other workers, by renaming the file."""
        if file is not None:
            publish_shard(file, shard_path(self._data, shard))
        return True

    def _keep(self, temporary: Path, path: Path) -> None:
        """Handle a shard that differs from the one that another worker has published: keep it and
        raise JobError if the two had to be equal."""
        if not self.exact:
            print(
                f"{path.name} was computed twice, with small differences, as can happen on a "
                "GPU: the first version stays",
                file=sys.stderr,
                flush=True,
            )
            return
        if self.by_schedule:
            files = self._storage.parquet(path), temporary
            if same_shard_bits(*files, besides=self.by_schedule):
                return
        kept = path.parent.parent / "differing" / f"{path.stem}.{self._worker:04d}.parquet"
        kept.parent.mkdir(exist_ok=True)
        temporary.rename(kept)
        self._storage.upload(kept)
        raise JobError(
            f"{path} was published by another worker, and this worker has computed different "
            f"rows, which are kept in {kept}: rows must not depend on which worker computes "
            "them. Compare the two files, and check that all workers run the same versions of "
            "batchgen and torch"
        )
