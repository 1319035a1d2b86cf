"""Writes whole files: a file never appears incomplete under its name, even if the program is
killed, the disk is full or the power fails."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from batchgen.storage.leases.fsync import fsync_path
from batchgen.util.errors import ConfigError, JobError
from batchgen.util.temporary import temporary_name


@contextmanager
def whole_file(path: Path, new: str | None = None) -> Iterator[Path]:
    """A context with a temporary path, next to `path`, to write to.

    When the body ends, the file is synced and gets its name; after an error it is deleted. If
    several processes write the same file, one of them wins.

    Args:
        new: the user's words for a file that must not exist yet, such as `--out FILE`. An existing
            file is never overwritten then, even if it appears meanwhile.

    Raises:
        ConfigError: a new file exists already, or cannot be made.
        JobError: the file cannot be written.
    """
    temporary = temporary_name(path)
    if new is not None:
        _check_new(path, temporary, new)
    try:
        yield temporary
        if new is None:
            publish_file(temporary, path)
        else:
            fsync_path(temporary)
            _publish_new(temporary, path, new)
            fsync_path(path.parent)
    except OSError as error:
        raise JobError(f"cannot write {path}: {error.strerror or error}") from error
    finally:
        temporary.unlink(missing_ok=True)


def publish_file(temporary: Path, path: Path) -> None:
    """Sync a file and give it its name.

    Raises:
        OSError, JobError: that failed.
    """
    fsync_path(temporary)
    temporary.replace(path)
    fsync_path(path.parent)


def write_atomic(path: Path, text: str, new: str | None = None) -> None:
    """Write a text file, see `whole_file`."""
    with whole_file(path, new) as temporary:
        temporary.write_text(text, encoding="utf-8")


def _check_new(path: Path, temporary: Path, new: str) -> None:
    """Check that a name is free and can be written, before any work is done for it."""
    if os.path.lexists(path):
        raise _is_there(new)
    try:
        temporary.open("xb").close()
    except FileNotFoundError:
        raise ConfigError(f"{new} cannot be written: there is no folder {path.parent}") from None
    except OSError as error:
        raise ConfigError(f"{new} cannot be written: {error.strerror}") from None


def _publish_new(temporary: Path, path: Path, new: str) -> None:
    """Give a file a name that is free."""
    try:
        os.link(temporary, path)
    except FileExistsError:
        raise _is_there(new) from None
    except OSError:  # a file system without links
        if os.path.lexists(path):
            raise _is_there(new) from None
        temporary.rename(path)


def _is_there(new: str) -> ConfigError:
    return ConfigError(
        f"{new} exists already and was not changed: choose another name, or delete it first"
    )
