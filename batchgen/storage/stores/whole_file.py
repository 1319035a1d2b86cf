"""Writes a file whole: under its name there is never a part of it, whenever the program is killed,
the disk is full or the power fails."""

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
    """A name beside `path` to write under. When the body ends, the file is synced and takes its
    name; after an error nothing of it is left. Of several processes that write one file, one wins.

    Args:
        new: what the user has named the file by, such as `--out FILE`: then it is a new file, and
            one that is there, or comes meanwhile, is never overwritten.

    Raises:
        ConfigError: a new file is there already, or cannot be made.
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
    """Give a file that was written its name. Raises OSError or JobError."""
    fsync_path(temporary)
    temporary.replace(path)
    fsync_path(path.parent)


def write_atomic(path: Path, text: str, new: str | None = None) -> None:
    """Write a text file, see `whole_file`."""
    with whole_file(path, new) as temporary:
        temporary.write_text(text, encoding="utf-8")


def _check_new(path: Path, temporary: Path, new: str) -> None:
    """Refuse a name that is taken or cannot be written, before there is work in it."""
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
