"""Saves rows that are piped into the command to a file, so that the job can be resumed
(`dataset.path=-`)."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from hashlib import blake2b
from pathlib import Path

from batchgen.util.errors import ConfigError
from batchgen.util.temporary import temporary_name

_CHUNK = 1 << 20
"""The bytes that are read at a time."""


def spooled_stdin(folder: Path) -> Path:
    """Write standard input into a file of a folder, and return the file.

    The file is named by a digest of its content. So a job resumes when the same rows are piped into
    the same command again. It cannot resume without them, because a saved file does not say to
    which command it belongs.

    Raises:
        ConfigError: standard input is a terminal or empty, or the file cannot be written.
    """
    if sys.stdin is None or sys.stdin.isatty():
        raise ConfigError(
            "dataset.path=- reads JSON lines from standard input, which is a terminal: pipe rows "
            "into the command, as in: cat rows.jsonl | batchgen …"
        )
    digest, part = blake2b(digest_size=16), temporary_name(folder / "stdin")
    try:
        folder.mkdir(parents=True, exist_ok=True)
        with part.open("wb") as out:
            while chunk := sys.stdin.buffer.read(_CHUNK):
                digest.update(chunk)
                out.write(chunk)
        size = part.stat().st_size
        file = part.replace(folder / f"{digest.hexdigest()}.jsonl")
    except OSError as error:
        part.unlink(missing_ok=True)
        raise ConfigError(
            f"dataset.path=-: the rows cannot be kept in {folder}: {error.strerror}: set "
            "HF_DATASETS_CACHE to another folder"
        ) from None
    if not size:
        raise ConfigError(
            "dataset.path=-: standard input is empty: pipe rows into the command (to resume a "
            "job, the same rows again)"
        )
    return file


@contextmanager
def called_stdin(file: Path) -> Iterator[None]:
    """Make errors within the `with` block name standard input instead of the file with its rows."""
    try:
        yield
    except ConfigError as error:
        raise ConfigError(str(error).replace(str(file), "standard input")) from None
