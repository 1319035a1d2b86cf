"""The output folder of a job, which belongs to this job alone while it runs."""

import shutil
from pathlib import Path
from typing import Self

from batchgen.errors import ConfigError, JobError
from batchgen.output.lock import FolderLock
from batchgen.output.manifest import Manifest

MIN_FREE_BYTES = 32 * 2**20
_MANIFEST = "manifest.json"
_LOCK = ".lock"
_OWN = ("data", "journal", "README.md", "config.yaml", "metrics.json", _MANIFEST)
"""All that a job ever writes, in the order in which it is deleted. The manifest is the last, so
that a folder still says whose it is if its deletion was interrupted."""


class JobFolder:
    """An output folder, locked while this object is entered.

        README.md  config.yaml  manifest.json  metrics.json  data/part-00000.parquet …
        journal/ (only while the job is not complete)  .lock

    Attributes:
        path: of the folder.
        is_new: whether this is the job's first attempt.
    """

    def __init__(self, path: Path, manifest: Manifest, *, overwrite: bool) -> None:
        """Make the folder this job's, or take up the same job where it was left.

        Args:
            manifest: of this job.
            overwrite: whether to delete the output of a different job. The same job is resumed in
                any case, so that running a command again always resumes.

        Raises:
            ConfigError: the folder cannot be written, holds files that are no job's or another
                job's output, or is in use. Nothing in it has been changed then.
        """
        self.path = path
        try:
            path.mkdir(parents=True, exist_ok=True)
            refuse_foreign_files(path)
            self._lock = FolderLock(path / _LOCK)
        except OSError as error:
            raise _unusable(path, error) from None
        try:
            self.is_new = self._claim(manifest, overwrite)
        except (OSError, JobError) as error:
            self.close()
            raise _unusable(path, error) from None
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

    @property
    def data(self) -> Path:
        return self.path / "data"

    @property
    def journal(self) -> Path:
        return self.path / "journal"

    def remove_journal(self) -> None:
        """Delete the journal, which a complete job does not need."""
        shutil.rmtree(self.journal)

    def _claim(self, manifest: Manifest, overwrite: bool) -> bool:
        path = self.path / _MANIFEST
        is_new = not path.exists()
        if not is_new:
            old = Manifest.read(path)
            differences = old.differences(manifest)
            if differences and not overwrite:
                raise ConfigError(
                    f"output.dir={self.path} holds the output of a different job:\n  "
                    + "\n  ".join(differences)
                    + "\nuse another output.dir, or output.overwrite=true to delete that output"
                )
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
            manifest.write(path)
        self.data.mkdir(exist_ok=True)
        self.journal.mkdir(exist_ok=True)
        # The folder may have become read-only since the first attempt.
        probe = self.journal / "probe.tmp"
        probe.write_bytes(b"0")
        probe.unlink()
        return is_new

    def _delete_output(self) -> None:
        for name in _OWN:
            path = self.path / name
            if path.is_dir() and not path.is_symlink():
                shutil.rmtree(path)
            else:
                path.unlink(missing_ok=True)


def _unusable(path: Path, error: OSError | JobError) -> ConfigError:
    why = error.strerror if isinstance(error, OSError) else error
    return ConfigError(
        f"output.dir={path} cannot be written ({why}): choose a folder that "
        "you may write to, on a disk with free space"
    )


def refuse_foreign_files(path: Path) -> None:
    """Refuse a folder that has files and no manifest: no job of ours has written them.

    Raises:
        ConfigError: it is such a folder.
        OSError: it is no folder, or cannot be read.
    """
    names = {entry.name for entry in path.iterdir()}
    foreign = sorted(names - {_LOCK, f".{_MANIFEST}.tmp"})
    if foreign and _MANIFEST not in names:
        listed = ", ".join(foreign[:3]) + (" …" if len(foreign) > 3 else "")
        raise ConfigError(
            f"output.dir={path} holds files that are not of a batchgen job ({listed}): choose a "
            "new or empty folder; batchgen does not delete them, whatever output.overwrite says"
        )
