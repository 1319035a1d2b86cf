"""Opens the second table of a row step: files, a data set of the Hugging Face hub, or a job's
folder. `Join`, `Against`, `Pick` and `Cross` use it."""

from __future__ import annotations

import glob
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from batchgen.config.groups.dataset_config import DatasetConfig
from batchgen.inputs.dataset.dataset_columns import column_path
from batchgen.inputs.tables.table_formats import table_format
from batchgen.storage.folder.step_folders import step_folder
from batchgen.storage.leases.job_files import MANIFEST
from batchgen.util.errors import ConfigError
from batchgen.util.package_files import PACKAGE_SCHEME
from batchgen.util.paths import is_url
from batchgen.util.shorten import some_names

ROW_ID, ANSWER_ID = "row_id", "answer_id"
"""The columns with the ids that the rows of a job's table have besides their own columns."""

if TYPE_CHECKING:
    from batchgen.inputs.dataset.source import Source


class SideTable:
    """A table at a path. The table of a job also has the ids of its rows, as the column `row_id`,
    and of its answers (`q17#3`), as `answer_id`.

    Args:
        path: files as for `dataset.path`, the folder of a complete job, or a data set of the hub.
        name, split: the configuration and the split of a data set of the hub.
    """

    def __init__(self, path: str, name: str | None = None, split: str | None = None) -> None:
        """Take the path. The methods open the table, and raise ConfigError if it cannot be read."""
        self._path, self._name, self._split = step_folder(path), name, split
        self._sources: dict[tuple[str, ...], Source] = {}
        there = Path(self._path).expanduser() / MANIFEST
        self._is_job = is_url(path) or there.is_file()

    @property
    def fingerprint(self) -> str:
        """A digest of the rows."""
        return self._source(()).fingerprint

    def features(self, columns: Sequence[str]) -> Mapping[str, Any]:
        """Return the types of the table's columns, which include `columns`. Raises ConfigError if
        one of these does not exist."""
        features = dict(self._source(columns).features)
        if self._is_job:
            from datasets import Value

            for name in (ROW_ID, ANSWER_ID):
                features.setdefault(name, Value("string"))
        for column in columns:
            if column_path(column, features) is None:
                near = some_names(features, column)
                raise ConfigError(
                    f"path: {self._path} has no column {column!r}: choose among {near}"
                )
        return features

    def rows(self, columns: Sequence[str]) -> Iterator[Mapping[str, Any]]:
        """Yield the fields of each row: at least these columns."""
        with of_table(self._path):
            for row in self._source(columns).rows():
                # Rows of a job (`UpstreamRow`) name the answer from which they were made.
                source = getattr(row, "source", None)
                if source is None:
                    yield row.fields
                else:
                    answer = f"{source[ROW_ID]}#{source['sample_index']}"
                    yield {ROW_ID: source[ROW_ID], ANSWER_ID: answer, **row.fields}

    def _source(self, columns: Sequence[str]) -> Source:
        """Open the table. Of a job, only what these columns need is read."""
        wanted = tuple(columns) if self._is_job else ()
        if wanted not in self._sources:
            with of_table(self._path):
                source = _opened(self._path, wanted, self._name, self._split, self._is_job)
            self._sources[wanted] = source
        return self._sources[wanted]


@contextmanager
def of_table(path: str) -> Iterator[None]:
    """Make errors within the context name the step's key `path` instead of `dataset.path`."""
    try:
        yield
    except ConfigError as error:
        text = str(error).removeprefix("dataset.")
        raise ConfigError(text if text.startswith("path:") else f"path: {path}: {text}") from None


def _opened(
    path: str, columns: tuple[str, ...], name: str | None, split: str | None, is_job: bool
) -> Source:
    if is_job:
        from batchgen.inputs.upstream.job_source import JobSource
        from batchgen.inputs.upstream.read_jobs import read_jobs

        used = frozenset([*columns, *(column.partition(".")[0] for column in columns)])
        source = JobSource(read_jobs((path,), None), DatasetConfig(kind="job", path=path), used)
        source.learn()
        return source
    from batchgen.inputs.dataset.row_source import (
        open_dataset,  # importing it takes seconds, and --help does not need it
    )

    kind: Literal["files", "hub"] = "files" if _is_local(path) else "hub"
    return open_dataset(DatasetConfig(kind=kind, path=path, name=name, split=split, columns=()))


def _is_local(path: str) -> bool:
    """Return whether a path means files, not a data set of the hub."""
    there = Path(path).expanduser()
    return (
        path.startswith((PACKAGE_SCHEME, "/", ".", "~"))
        or there.exists()
        or glob.has_magic(path)
        or table_format(there) is not None
    )
