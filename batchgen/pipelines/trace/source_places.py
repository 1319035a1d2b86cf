"""Finds the file that holds a row of a data set, and the folders of jobs that were moved together.
Traces and lock files use it."""

from __future__ import annotations

import glob
import gzip
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq

from batchgen.pipelines.trace.traced import TracedSource
from batchgen.storage.folder.pipeline_record import step_of
from batchgen.util.errors import ConfigError
from batchgen.util.package_files import PACKAGE_SCHEME, find_in_package
from batchgen.util.paths import is_url, user_path

_LINES = (".jsonl", ".jsonl.gz")


def source_place(dataset: Mapping[str, Any], index: int) -> TracedSource:
    """Locate a row of a data set, by its index.

    Args:
        dataset: the group `dataset` of a job's configuration.
    """
    text = str(dataset.get("path") or dataset.get("kind"))
    if split := dataset.get("split"):
        text += f", split {split}"
    if dataset.get("kind") != "files" or dataset.get("path") in (None, "-"):
        return TracedSource(text, index)
    first = 0
    for file in _files(str(dataset["path"])):
        rows = _count(file)
        if rows is None:
            break
        if index < first + rows:
            return TracedSource(text, index, str(file), index - first)
        first += rows
    return TracedSource(text, index)


def _files(path: str) -> list[Path]:
    """Return the files at a path or glob, in reading order; none for a folder."""
    try:
        if path.startswith(PACKAGE_SCHEME):
            return [find_in_package(path, "dataset.path:")]
        root = user_path(path, "dataset.path")
    except ConfigError:
        return []
    if glob.has_magic(str(root)) and not root.exists():
        names = sorted(glob.glob(str(root), recursive=True))
        return [Path(name) for name in names if Path(name).is_file()]
    return [root] if root.is_file() else []


def _count(file: Path) -> int | None:
    """Return the number of rows of a file; None if it is unknown without parsing the file."""
    try:
        if file.suffix == ".parquet":
            return int(pq.read_metadata(file).num_rows)
        if file.name.endswith(_LINES):
            opener: Any = gzip.open if file.suffix == ".gz" else open
            with opener(file, "rb") as lines:
                return sum(bool(line.strip()) for line in lines)
    except (OSError, pa.ArrowException):
        pass
    return None


def places_beside(paths: Sequence[str], reader: Path) -> list[str]:
    """Return the paths of the jobs that another job reads. A path at which nothing exists is
    replaced by a folder of that name next to the reader's folder, if there is one: both may have
    been moved.

    Args:
        paths: the paths in the reader's configuration.
        reader: the folder of the reading job.
    """
    above = reader.resolve().parent
    folders = []
    for path in paths:
        candidate = above / Path(path).name
        is_there = is_url(path) or glob.has_magic(path) or user_path(path, "dataset.path").exists()
        folders.append(path if is_there or not candidate.is_dir() else str(candidate))
    return folders


def jobs_at(paths: Sequence[str], reader: Path) -> dict[str, str]:
    """Return the folders of the jobs that another job reads, by the names with which row ids
    begin."""
    jobs: dict[str, str] = {}
    for path in places_beside(paths, reader):
        for folder in _folders(path):
            name = folder.rstrip("/").rpartition("/")[2]
            jobs[step_of(name) or name] = folder
    return jobs


def _folders(path: str) -> list[str]:
    """Return the folders at a path, URL or glob."""
    if is_url(path) or not glob.has_magic(path):
        return [path]
    here = user_path(path, "dataset.path")
    names = [str(here)] if here.is_dir() else sorted(glob.glob(str(here)))
    return [name for name in names if Path(name).is_dir()]
