"""The folder in which a launcher and its workers on other machines meet: `OUT/logs/ray-…`.

It has the job file of the workers and what they print. That a worker can read its job file there
shows that it sees the job's output folder, too.
"""

from __future__ import annotations

import shutil
import tempfile
from pathlib import Path

from batchgen.folder.job_folder import refuse_foreign_files, unusable
from batchgen.leases.own_files import LOGS
from batchgen.storage.job_storage import FolderStorage


def make_logs(out: Path, launcher: str) -> Path:
    """Make a new folder for the logs of one launch.

    Args:
        out: the job's output folder, which is made if it is not there.

    Raises:
        ConfigError: the folder cannot be written, or holds files that are no job's.
    """
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
    """Delete the logs of a launch that nobody needs any more."""
    shutil.rmtree(logs, ignore_errors=True)
    if not any(logs.parent.iterdir()):
        logs.parent.rmdir()
