"""Names of temporary files that are renamed once they are complete. No two writers share a name."""

from __future__ import annotations

import os
import secrets
import shutil
from collections.abc import Collection
from pathlib import Path


def temporary_name(path: Path) -> Path:
    """Return a new hidden name next to a file or folder: to write under before a rename, or to
    rename to before a deletion. Every call returns another name. `delete_temporaries` deletes
    leftovers of killed processes."""
    return path.with_name(f".{path.name}.{os.getpid()}-{secrets.token_hex(4)}.tmp")


def is_temporary_of(name: str, file: str) -> bool:
    """Whether `name` is a temporary name of `file`. Both are names without a folder."""
    return name.startswith(f".{file}.") and name.endswith(".tmp")


def delete_temporaries(folder: Path, files: Collection[str] | None = None) -> None:
    """Delete leftovers of killed processes in a folder in which nobody writes.

    Args:
        files: the names whose temporaries are deleted; None for all.
    """
    for path in folder.glob(".*.tmp"):
        if files is None or any(is_temporary_of(path.name, file) for file in files):
            if path.is_dir() and not path.is_symlink():
                shutil.rmtree(path)
            else:
                path.unlink(missing_ok=True)
