"""Makes sure that written data are on the disk."""

import os
from pathlib import Path

from batchgen.util.errors import JobError


def fsync_path(path: Path) -> None:
    """Call fsync(2) on a file or a folder.

    Raises:
        FileNotFoundError: it was deleted.
        JobError: the disk is full or fails.
    """
    try:
        fd = os.open(path, os.O_RDONLY)
        try:
            os.fsync(fd)
        finally:
            os.close(fd)
    except FileNotFoundError:
        raise
    except OSError as error:
        raise JobError(f"cannot write {path} to the disk: {error.strerror or error}") from error
