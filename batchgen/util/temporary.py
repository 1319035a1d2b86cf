"""Names of files that are not whole yet: no two writers have the same one."""

from __future__ import annotations

import os
import secrets
import shutil
from collections.abc import Collection
from pathlib import Path


def temporary_name(path: Path) -> Path:
    """A new name beside a file, under which it is written before it is renamed, or beside a folder,
    which is renamed before it is deleted.

    Processes of several machines, and threads, may write the same file at once; each gets a name
    of its own. What a killed process has left under such a name, `delete_temporaries` deletes.
    """
    return path.with_name(f".{path.name}.{os.getpid()}-{secrets.token_hex(4)}.tmp")


def is_temporary_of(name: str, file: str) -> bool:
    """Whether `name` is a temporary name of `file`, both without their folder."""
    return name.startswith(f".{file}.") and name.endswith(".tmp")


def delete_temporaries(folder: Path, files: Collection[str] | None = None) -> None:
    """Delete what killed processes have left in a folder; nobody may be writing there.

    Args:
        files: whose temporary names are meant; None means all, in a folder that has no files of
            users.
    """
    for path in folder.glob(".*.tmp"):
        if files is None or any(is_temporary_of(path.name, file) for file in files):
            if path.is_dir() and not path.is_symlink():
                shutil.rmtree(path)
            else:
                path.unlink(missing_ok=True)
