"""The output folder of a job, which belongs to this job alone while it runs."""

import itertools
import shutil
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Self

from batchgen.errors import ConfigError, JobError
from batchgen.output.journal import attempt_of, journal_files
from batchgen.output.lock import FolderLock
from batchgen.output.manifest import ROWS, Manifest, RowDigests
from batchgen.output.retry_round import RetryRound
from batchgen.output.shards import shard_files
from batchgen.temporary import delete_temporaries, is_temporary_of

MIN_FREE_BYTES = 32 * 2**20
_MANIFEST = "manifest.json"
_LOCK = ".lock"
LOGS = "logs"
"""Where launchers put what workers on other machines print."""
_OF_WORKERS = ("leases", "workers")
"""What tells the workers of a job of each other while it runs."""
_OWN = (
    *("data", "journal", "differing", "grades", *_OF_WORKERS, "report.html"),
    *("README.md", "config.yaml", "metrics.json", _MANIFEST),
)
"""All that a job ever writes, in the order in which it is deleted. The manifest is the last, so
that a folder still says whose it is if its deletion was interrupted."""
_WITH_SHARDS = ("data", "grades")


class JobFolder:
    """An output folder, locked while this object is entered.

        README.md  config.yaml  manifest.json  metrics.json  data/part-00000.parquet …
        journal/  leases/  workers/ (only while the job is not complete)  .lock
        grades/part-00000.parquet …  grades/steps.json (if the job has `post` steps)
        report.html (once it is complete)
        logs/ (of workers that a launcher has started on other machines)

    The lock is held alone until `share`, so that others join a job that is as it shall be. Those
    who join find the same job, or are refused.

    Attributes:
        path: of the folder.
        is_alone: whether no other worker of the job runs. Then the job may change.
        least_worker: the number of a new worker is at least this.
        is_new: whether this is the job's first attempt.
        manifest: as it is written in the folder.
    """

    def __init__(
        self,
        path: Path,
        manifest: Manifest,
        digests: RowDigests,
        *,
        overwrite: bool,
        wait: float = 0.0,
        is_alone: Callable[[Path], bool] = lambda path: True,
    ) -> None:
        """Make the folder this job's, or take up the same job where it was left.

        A job that has grown is the same one. A folder in which no row is finished is any job's.

        Args:
            manifest: of this job, without digests of its rows.
            digests: of the rows of this job's data set.
            overwrite: whether to delete the output of a different job. The same job is resumed in
                any case, so that running a command again always resumes.
            wait: for so many seconds for another worker that is opening the folder.
            is_alone: whether the folder is nobody else's, as far as can be known without the lock,
                which does not reach other machines on every file system.

        Raises:
            ConfigError: the folder cannot be written, holds files that are no job's or another
                job's output, or is in use. Nothing in it has been changed then.
        """
        self.path = path
        try:
            path.mkdir(parents=True, exist_ok=True)
            refuse_foreign_files(path)
            self._lock = FolderLock(path / _LOCK, join=True, wait=wait)
        except OSError as error:
            raise unusable(path, error) from None
        try:
            self.is_alone = self._lock.is_alone and is_alone(path)
            if not self.is_alone:
                self.share()
                self._join(manifest, digests)
            self.is_new = self.is_alone and self._claim(manifest, digests, overwrite)
        except (OSError, JobError) as error:
            self.close()
            raise unusable(path, error) from None
        except ConfigError:
            self.close()
            raise

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """Give the lock back."""
        self._lock.__exit__()

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
        """Delete the journal and what workers wrote, which a complete job does not need."""
        for name in ("journal", *_OF_WORKERS):
            # Other workers, who wait for the end, may write a last heartbeat in between.
            while (self.path / name).exists():
                shutil.rmtree(self.path / name, ignore_errors=True)

    def record(self, *more: str, rows: int) -> None:
        """Write into the manifest's history how the job has grown, if it has.

        This comes before the first row of the grown job is written.

        Args:
            more: further lines that say what has changed.
            rows: how many output rows are finished.

        Raises:
            JobError: the manifest cannot be written.
        """
        if changed := [*self.manifest.grown(self._asked), *more]:
            asked, digests = self._asked, self.manifest.row_digests
            if asked.growing.get(ROWS) != self.manifest.growing.get(ROWS):
                digests = self._digests()
            asked = replace(asked, row_digests=digests)
            self.update(self.manifest.goes_on(asked, changed, rows))

    def update(self, manifest: Manifest) -> None:
        """Write another manifest of the same job.

        Raises:
            JobError: it cannot be written.
        """
        self.manifest = manifest
        manifest.write(self.path / _MANIFEST)

    def _join(self, manifest: Manifest, digests: RowDigests) -> None:
        """Take part in the job of those who have the folder.

        Raises:
            ConfigError: it is another job, or the same with other rows.
        """
        self.manifest = Manifest.read(self.path / _MANIFEST)
        others = self.manifest.differences(manifest, digests) or self.manifest.grown(manifest)
        if others:
            error = self._lock.in_use()
            raise ConfigError(f"{error}\nthat job differs from this one:\n  " + "\n  ".join(others))
        self.least_worker = 1

    def _claim(self, manifest: Manifest, digests: RowDigests, overwrite: bool) -> bool:
        path = self.path / _MANIFEST
        self._asked = manifest
        self.least_worker = self._least_worker()
        for name in _OF_WORKERS:  # of workers who all are gone
            shutil.rmtree(self.path / name, ignore_errors=True)
        delete_temporaries(self.path, _OWN)
        for folder in _WITH_SHARDS:
            delete_temporaries(self.path / folder)
        rows = manifest.growing.get(ROWS)

        def own_digests() -> list[str] | None:
            return None if rows is None else digests(rows)

        self._digests = own_digests
        is_new = not path.exists()
        if not is_new:
            self.manifest = Manifest.read(path)
            differences = self.manifest.differences(manifest, digests)
            if differences and not overwrite and has_rows(self.path):
                raise different_job(self.path, differences)
            if differences:
                self._delete_output()
                is_new = True
        if is_new:
            free = shutil.disk_usage(self.path).free
            if free < MIN_FREE_BYTES:
                raise ConfigError(
                    f"output.dir={self.path} has {free >> 20} MiB of free disk space, which is too "
                    "little for any job: free some, or choose another output.dir"
                )
            self.update(replace(manifest, row_digests=self._digests()))
        self.data.mkdir(exist_ok=True)
        self.journal.mkdir(exist_ok=True)
        # The folder may have become read-only since the first attempt.
        probe = self.journal / "probe.tmp"
        probe.write_bytes(b"0")
        probe.unlink()
        return is_new

    def _least_worker(self) -> int:
        """A number above those of all that have written here: a journal file has one writer.

        Heartbeats alone do not say it: they are deleted before the first new one is written.
        """
        found = [int(path.stem) for path in (self.path / "workers").glob("[0-9]*.json")]
        if self.journal.is_dir():
            files = itertools.chain.from_iterable(journal_files(self.journal).values())
            found += [attempt_of(path) for path in files]
            found.append(RetryRound(self.journal).least_attempt - 1)
        return 1 + max(found, default=0)

    def _delete_output(self) -> None:
        for name in _OWN:
            path = self.path / name
            if path.is_dir() and not path.is_symlink():
                shutil.rmtree(path)
            else:
                path.unlink(missing_ok=True)


def unusable(path: Path, error: OSError | JobError) -> ConfigError:
    """The error for an output folder that cannot be written."""
    why = error.strerror if isinstance(error, OSError) else error
    return ConfigError(
        f"output.dir={path} cannot be written ({why}): choose a folder that "
        "you may write to, on a disk with free space"
    )


def has_rows(path: Path) -> bool:
    """Whether a row of the job in a folder may be finished."""
    data, journal = path / "data", path / "journal"
    shards = shard_files(data) if data.is_dir() else {}
    return bool(shards or (journal_files(journal) if journal.is_dir() else {}))


def different_job(path: Path, differences: Sequence[str]) -> ConfigError:
    """The error for a folder with the output of another job.

    Args:
        differences: lines that say in what it is another.
    """
    return ConfigError(
        f"output.dir={path} holds the output of a different job:\n  "
        + "\n  ".join(differences)
        + "\nuse another output.dir, or output.overwrite=true to delete that output"
    )


def refuse_foreign_files(path: Path) -> None:
    """Refuse a folder that has files and no manifest: no job of ours has written them.

    Raises:
        ConfigError: it is such a folder.
        OSError: it is no folder, or cannot be read.
    """
    names = {entry.name for entry in path.iterdir()}
    own = {_LOCK, LOGS}
    foreign = sorted(n for n in names - own if not is_temporary_of(n, _MANIFEST))
    if foreign and _MANIFEST not in names:
        listed = ", ".join(foreign[:3]) + (" …" if len(foreign) > 3 else "")
        raise ConfigError(
            f"output.dir={path} holds files that are not of a batchgen job ({listed}): choose a "
            "new or empty folder; batchgen does not delete them, whatever output.overwrite says"
        )
