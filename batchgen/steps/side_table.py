"""Another table that a step reads beside the rows: files, a data set of the hub, a job's folder."""

from __future__ import annotations

import glob
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

from batchgen.config.dataset_config import DatasetConfig
from batchgen.dataset.dataset_columns import column_path
from batchgen.leases.own_files import MANIFEST
from batchgen.util.errors import ConfigError
from batchgen.util.package_files import PACKAGE_SCHEME
from batchgen.util.shorten import some_names

if TYPE_CHECKING:
    from batchgen.dataset.row_source import RowSource


def open_table(
    path: str, columns: Sequence[str], name: str | None = None, split: str | None = None
) -> RowSource:
    """The table at a path, which has these columns; ConfigError if it cannot be read or lacks one.

    The path is that of files as `dataset.path` has it, a job's folder, or the name of a data set on
    the hub, whose configuration and split can be named.
    """
    from batchgen.dataset.row_source import open_dataset  # takes seconds, and --help needs it not

    with of_table(path):
        if _is_local(path):
            config = DatasetConfig(
                kind="files", path=_files(path), name=name, split=split, columns=()
            )
        else:
            config = DatasetConfig(kind="hub", path=path, name=name, split=split, columns=())
        source = open_dataset(config)
    for column in columns:
        if column_path(column, source.features) is None:
            near = some_names(source.features, column)
            raise ConfigError(f"path: {path} has no column {column!r}: choose among {near}")
    return source


@contextmanager
def of_table(path: str) -> Iterator[None]:
    """Name the step's own key in errors about its table."""
    try:
        yield
    except ConfigError as error:
        said = str(error).removeprefix("dataset.")
        raise ConfigError(said if said.startswith("path:") else f"path: {path}: {said}") from None


def _is_local(path: str) -> bool:
    there = Path(path).expanduser()
    return (
        path.startswith((PACKAGE_SCHEME, "/", ".", "~"))
        or there.exists()
        or bool(glob.has_magic(path))
        or bool(there.suffix)
    )


def _files(path: str) -> str:
    """The files of a table; those of a job are its rows."""
    folder = Path(path).expanduser()
    return str(folder / "data") if (folder / MANIFEST).is_file() else path
