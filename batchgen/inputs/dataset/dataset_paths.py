"""Finds the files that `dataset.path` names, without importing any data library. `dataset_files`
and the early checks of a job use this."""

from __future__ import annotations

import glob
from collections.abc import Sequence
from pathlib import Path

from batchgen.inputs.tables.table_formats import SUPPORTED, table_format
from batchgen.util.errors import ConfigError
from batchgen.util.package_files import PACKAGE_SCHEME, find_in_package
from batchgen.util.paths import short_user_path


def local_path(path: str) -> Path:
    """Return the file, folder or glob that a path names, possibly inside a Python package."""
    if path.startswith(PACKAGE_SCHEME):
        return find_in_package(path, "dataset.path:")
    return short_user_path(path, "dataset.path")


def find_files(path: Path) -> list[Path]:
    """Return the files that a path names: a file, or those that match a glob.

    Raises:
        ConfigError: there is no such file, or the files have an unknown format or several formats.
    """
    if path.is_file():
        files = [path]
    elif glob.has_magic(str(path)):
        files = [Path(name) for name in sorted(glob.glob(str(path), recursive=True))]
        files = [file for file in files if file.is_file()]
        if not files:
            raise ConfigError(f"dataset.path: no file matches {path} (from {Path.cwd()})")
    else:
        where = "" if path.is_absolute() else f" in {Path.cwd()}"
        hub = "; for a data set of the hub use dataset=hub" if _like_hub_name(str(path)) else ""
        raise ConfigError(f"dataset.path: {path} does not exist{where}{hub}")
    check_formats(files)
    return files


def _like_hub_name(path: str) -> bool:
    """Whether a path looks like the name of a data set on the hub."""
    return (
        path.count("/") <= 1
        and not path.startswith((".", "/"))
        and table_format(Path(path)) is None
    )


def check_formats(files: Sequence[Path]) -> str:
    """Return the format that all files have. Raises ConfigError for an unknown format or several
    formats."""
    by_format: dict[str | None, Path] = {}
    for file in files:
        by_format.setdefault(table_format(file), file)
    if None in by_format:
        raise ConfigError(
            f"dataset.path: {by_format[None]} is of no known format: use {SUPPORTED} "
            "(those of text also with .gz)"
        )
    if len(by_format) > 1:
        examples = ", ".join(f"{kind} ({file.name})" for kind, file in by_format.items())
        raise ConfigError(
            f"dataset.path: files of several formats, {examples}: choose one with a glob such as "
            f"'{files[0].parent}/*{files[0].suffix}'"
        )
    (kind,) = by_format
    assert kind is not None
    return kind
