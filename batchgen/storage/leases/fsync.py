"""Makes sure that what was written is on the disk."""

import os
from pathlib import Path

from batchgen.util.errors import JobError


def fsync_path(path: Path) -> None:
    """fsync a file or a folder; a file that was deleted raises FileNotFoundError, a full disk
    JobError."""
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
