"""Opens the output folder of a job for writing, and keeps other jobs out of it while it is open."""

import contextlib
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Self

from batchgen.storage.folder.refused_folder import (
    refuse_folder,
    refuse_other_job,
    unusable,
    written_manifest,
)
from batchgen.storage.leases.job_files import JOB_FILES, MANIFEST, OF_WORKERS
from batchgen.storage.leases.lease_files import DATA, JOURNAL, WORKERS, parse_worker
from batchgen.storage.shards.journal import attempts_in
from batchgen.storage.stores.folder_storage import FolderStorage, names_in
from batchgen.storage.stores.job_storage import Storage
from batchgen.storage.stores.manifest import ROWS, ChangedRow, Manifest, RowDigests
from batchgen.storage.stores.retry_round import RetryRound
from batchgen.util.errors import ConfigError, JobError, OpenedAnew
from batchgen.util.temporary import delete_temporaries

_WITH_SHARDS = (DATA, "grades", "cost")  # folders with a file or more for each shard


class JobFolder:
    """An output folder, locked until this object is closed.

        README.md  config.yaml  manifest.json  metrics.json  data/part-00000.parquet …
        journal/  leases/  workers/ (only while the job is not complete)  .lock
        grades/part-00000.parquet … (if the job has `post` steps)
        cost/part-00000.0001.parquet … (the device's seconds for each row, by worker)
        report.html (once the job is complete)
        logs/ (of workers that a launcher has started on other machines)

    The lock is exclusive until `share` is called, so that other workers join only when the folder
    is ready. They must run the same job, or are refused.

    Attributes:
        path: the folder.
        storage: reads and writes its files.
        exclusive: whether no other worker of the job runs. Only then may the job change.
        least_worker: the lowest number that a new worker may have.
        is_new: whether this is the job's first attempt.
        manifest: the manifest in the folder.
    """

    def __init__(
        self,
        path: Path,
        manifest: Manifest,
        digests: RowDigests,
        *,
        changed_row: ChangedRow = lambda *_: None,
        overwrite: bool,
        wait: float = 0.0,
        exclusive: Callable[[Path], bool] = lambda path: True,
        storage: Storage | None = None,
        follows: bool = False,
        lacks_rows: bool = False,
    ) -> None:
        """Make the folder this job's, or resume the same job in it.

        A job that has grown is the same job. A folder without finished rows is free for any job.

        Args:
            manifest: the manifest of this job, without the digests of its rows, which `digests`
                makes.
            changed_row: names a row of the data set that has changed.
            overwrite: whether to delete the output of a different job.
            wait: seconds to wait for another worker that is opening the folder.
            exclusive: returns whether no other worker uses the folder, without looking at the lock,
                which other machines may not see.
            follows: whether rows arrive while the job runs, so that more rows are the same job.
            lacks_rows: whether rows may arrive later, so that fewer rows are the same job.

        Raises:
            ConfigError: the folder cannot be written, holds foreign files or another job's output,
                or is in use. It has not been changed.
        """
        self.path = path
        self._changed_row, self._row_digests, self._follows = changed_row, digests, follows
        self._lacks_rows = lacks_rows
        self.storage = FolderStorage(path) if storage is None else storage
        try:
            refuse_folder(self.storage)
            self.storage.make_folder(path)
            self._lock = self.storage.lock(wait)
        except (OSError, JobError) as error:
            self.storage.close()
            raise unusable(self.storage, error) from None
        except ConfigError:
            self.storage.close()
            raise
        try:
            self.exclusive = self._lock.exclusive and exclusive(path)
            if not self.exclusive:
                self.share()
                self._join(manifest, digests)
            self.is_new = self.exclusive and self._claim(manifest, digests, overwrite)
        except (ConfigError, OpenedAnew):
            self.close()
            raise
        except (OSError, JobError) as error:
            self.close()
            raise unusable(self.storage, error) from None

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """Release the lock, and close the storage."""
        try:
            self._lock.__exit__()
        finally:
            self.storage.close()

    def confirm(self) -> None:
        """Raise JobError if another process has locked the folder exclusively since this one opened
        it."""
        self._lock.confirm()

    def share(self) -> None:
        """Let other workers join."""
        self._lock.share()

    @property
    def data(self) -> Path:
        return self.path / "data"

    @property
    def journal(self) -> Path:
        return self.path / "journal"

    def remove_journal(self) -> None:
        """Delete the journal and the files of workers, which a complete job does not need."""
        for name in ("journal", *OF_WORKERS):
            # Other workers that wait for the end may write another heartbeat meanwhile.
            while self.storage.exists(self.path / name):
                with contextlib.suppress(OSError):
                    self.storage.delete(self.path / name)

    def record(self, *more: str, rows: int) -> None:
        """Write into the manifest's history that the job has grown, if it has. `rows` is the number
        of rows that were finished before.

        This is called before the first row of the grown job is written.
        """
        if self._follows:
            self.settle(self._requested)
        if changed := [*self.manifest.grown(self._requested), *more]:
            manifest, digests = self._requested, self.manifest.row_digests
            if manifest.growing.get(ROWS) != self.manifest.growing.get(ROWS):
                digests = self._digests_of_requested()
            manifest = replace(manifest, row_digests=digests)
            self.update(self.manifest.goes_on(manifest, changed, rows))

    def settle(self, requested: Manifest) -> None:
        """Bring the manifest up to date with the rows that have arrived while the job ran."""
        rows = requested.growing.get(ROWS)
        assert isinstance(rows, int)
        written = written_manifest(self.storage) or self.manifest
        self.update(written.with_rows(requested, self._row_digests(rows)))

    def update(self, manifest: Manifest) -> None:
        """Write another manifest of the same job."""
        self.manifest = manifest
        self.storage.write(self.path / MANIFEST, manifest.text())

    def _join(self, manifest: Manifest, digests: RowDigests) -> None:
        """Join the job of the workers that have the folder open.

        Raises:
            ConfigError: they run another job.
        """
        written = written_manifest(self.storage)
        if written is None:
            raise self._lock.in_use()
        self.manifest = written
        if self._follows:
            manifest = manifest.with_rows(written, written.row_digests)
        others = self.manifest.differences(manifest, digests) or self.manifest.grown(manifest)
        if others:
            error = self._lock.in_use()
            raise ConfigError(f"{error}\nthat job differs from this one:\n  " + "\n  ".join(others))
        self.least_worker = 1

    def _claim(self, manifest: Manifest, digests: RowDigests, overwrite: bool) -> bool:
        """Prepare the folder for this job, which is its only user; return whether the job is new
        there."""
        self._requested = manifest
        self.confirm()
        self.least_worker = self._least_worker()
        for name in OF_WORKERS:  # all of these workers have ended
            with contextlib.suppress(OSError):
                self.storage.delete(self.path / name)
        # An object store has no temporary files, because objects appear as a whole.
        delete_temporaries(self.path, JOB_FILES)
        for folder in _WITH_SHARDS:
            delete_temporaries(self.path / folder)
        written = written_manifest(self.storage)
        is_new = written is None
        if written is not None:
            self.manifest = written
            rows, written_rows = (one.growing.get(ROWS) or 0 for one in (manifest, written))
            if self._lacks_rows and rows < written_rows:
                manifest = manifest.with_rows(written, written.row_digests)
            if refuse_other_job(
                self.storage, written, manifest, digests, self._changed_row, overwrite=overwrite
            ):
                self.confirm()
                for name in JOB_FILES:
                    self.storage.delete(self.path / name)
                is_new = True
        if is_new:
            self.update(replace(manifest, row_digests=self._digests_of_requested()))
        self.storage.make_folder(self.data)
        self.storage.make_folder(self.journal)
        # The folder may have become read-only since the first attempt.
        probe = self.journal / "probe.tmp"
        probe.write_bytes(b"0")
        probe.unlink()
        return is_new

    def _digests_of_requested(self) -> list[str] | None:
        """The digests of the rows of the job as this process was asked to run it; None if their
        number is not known."""
        rows = self._requested.growing.get(ROWS)
        return None if rows is None else self._row_digests(rows)

    def _least_worker(self) -> int:
        """A number above those of all workers that have written here. Journals are read too,
        because heartbeats are deleted when a job ends."""
        beats = names_in(self.storage, WORKERS)
        numbers = [number for name in beats if (number := parse_worker(name)) is not None]
        if names := names_in(self.storage, JOURNAL):
            numbers += attempts_in(names)
            numbers.append(RetryRound(self.journal, self.storage).least_attempt - 1)
        return 1 + max(numbers, default=0)
