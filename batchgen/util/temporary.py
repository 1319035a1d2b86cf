"""Names for temporary files that are renamed once they are complete; no two writers share one."""

from __future__ import annotations

import os
import secrets
import shutil
from collections.abc import Collection
from pathlib import Path


def temporary_name(path: Path) -> Path:
    """A new name beside a file or folder, for writing before a rename, or renaming before deletion.
    Each process and thread gets its own; `delete_temporaries` deletes what killed processes
    left."""
    return path.with_name(f".{path.name}.{os.getpid()}-{secrets.token_hex(4)}.tmp")


def is_temporary_of(name: str, file: str) -> bool:
    """Whether `name` is a temporary name of `file`, both without their folder."""
    return name.startswith(f".{file}.") and name.endswith(".tmp")


def delete_temporaries(folder: Path, files: Collection[str] | None = None) -> None:
    """Delete what killed processes have left in a folder where nobody writes; None means all
    files' names."""
    for path in folder.glob(".*.tmp"):
        if files is None or any(is_temporary_of(path.name, file) for file in files):
            if path.is_dir() and not path.is_symlink():
                shutil.rmtree(path)
            else:
                path.unlink(missing_ok=True)
