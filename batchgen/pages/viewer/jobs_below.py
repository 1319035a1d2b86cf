"""Finds the jobs below a folder, with the facts that the job list of `batchgen view FOLDER` shows.

The folder may come from a stranger: links are not followed, and depth, file sizes, and the numbers
of jobs and directory entries are limited.
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace
from hashlib import blake2b
from pathlib import Path
from typing import Any

from batchgen.config.groups.dataset_config import dataset_name
from batchgen.evals.arms.job_facts import is_config
from batchgen.pages.viewer.overview import rows_to_come
from batchgen.storage.folder.job_summary import JobSummary
from batchgen.storage.folder.read_job import JobFolderReader
from batchgen.storage.folder.row_funnel import num_questions
from batchgen.storage.stores.manifest import Manifest
from batchgen.util.errors import ConfigError, JobError
from batchgen.util.shorten import short_name
from batchgen.util.text.text_table import score_value, value_range

DEEPEST = 4
"""The most levels of folders searched below the given folder, including the job's folder."""
MOST_JOBS = 500
MOST_ENTRIES = 50_000
_MOST_BYTES = {"manifest.json": 2**26, "metrics.json": 2**24, "config.yaml": 2**20}


@dataclass(frozen=True)
class JobBelow:
    """One job in the list."""

    key: str  # identifies the job in URLs; a hash of `name`
    name: str  # the job's folder, relative to the folder that is searched
    path: Path
    fault: str = ""  # why the job cannot be shown; empty if it can
    state: str = ""
    model: str = ""
    dataset: str = ""
    begun: str = ""  # the date and time (UTC), to the minute
    questions: int | None = None  # input rows
    rows: int | None = None  # finished answers
    of_rows: int | None = None  # answers that an incomplete job will have; None if complete
    score: float | None = None
    shown_score: str = ""
    interval: str = ""  # the 95% confidence interval, for a new sample of questions

    @property
    def folder(self) -> str:
        """The parent of the job's folder, relative to the searched folder; empty if that is the
        parent."""
        return self.name.rpartition("/")[0]

    @property
    def short_model(self) -> str:
        return short_name(self.model)

    @property
    def short_dataset(self) -> str:
        return ", ".join(map(short_name, self.dataset.split(", ")))


@dataclass
class Below:
    """The result of `jobs_below`."""

    jobs: list[JobBelow] = field(default_factory=list)  # sorted by name
    empty: list[str] = field(default_factory=list)  # direct subfolders without a job
    links: list[str] = field(default_factory=list)  # links to folders, which are not followed
    is_cut: bool = False  # whether a limit ended the search early


def jobs_below(folder: Path) -> Below:
    """Find the jobs at most DEEPEST levels below a folder. A job's folder is not searched for more
    jobs."""
    below, walk = Below(), _Walk()
    for entry in walk.entries(folder, below):
        before = len(below.jobs)
        _search(Path(entry), entry.name, DEEPEST, walk, below)
        if len(below.jobs) == before:
            below.empty.append(entry.name)
    below.links.sort()
    return below


class _Walk:
    """Lists folders, and stops after MOST_ENTRIES directory entries in all."""

    def __init__(self) -> None:
        self._left = MOST_ENTRIES

    def entries(self, folder: Path, below: Below, name: str = "") -> Iterator[os.DirEntry[str]]:
        """Yield the visible subfolders of a folder, sorted by name, until a limit is reached.
        Records links and reached limits in `below`.

        Args:
            name: the prefix of the names of links: the relative path of `folder` with a slash.
        """
        try:
            with os.scandir(folder) as scan:
                folders = []
                for entry in scan:
                    self._left -= 1
                    if self._left < 0:
                        below.is_cut = True
                        break
                    if entry.is_symlink():
                        if entry.is_dir():
                            below.links.append(name + entry.name)
                    elif entry.is_dir() and not entry.name.startswith("."):
                        folders.append(entry)
        except OSError:  # another user's, or gone by now
            return
        for entry in sorted(folders, key=lambda entry: entry.name):
            if len(below.jobs) >= MOST_JOBS:
                below.is_cut = True
                return
            yield entry


def _search(folder: Path, name: str, depth: int, walk: _Walk, below: Below) -> None:
    """Add the job in a folder; if the folder has none, search its subfolders."""
    if os.path.lexists(folder / "manifest.json"):
        below.jobs.append(_job(folder, name))
    elif depth > 1:
        for entry in walk.entries(folder, below, f"{name}/"):
            _search(Path(entry), f"{name}/{entry.name}", depth - 1, walk, below)


def _job(folder: Path, name: str) -> JobBelow:
    key = blake2b(os.fsencode(name), digest_size=8).hexdigest()
    job = JobBelow(key, name, folder)
    try:
        reader = JobFolderReader(folder)
        if fault := _too_large(folder):
            return replace(job, fault=fault)
        # The configuration has the same facts, but takes milliseconds to read.
        manifest, summary = Manifest.read(folder / "manifest.json"), JobSummary.of(reader.metrics)
        dataset = manifest.identity.get("dataset") or {}
        to_come, score = rows_to_come(summary), summary.mean_mark if summary.score else None
        questions = num_questions(manifest, reader.row_facts)
        return replace(
            job,
            state=str(summary.status),
            model=_text(manifest.growing.get("model.path")),
            dataset=dataset_name({**dataset, "path": manifest.growing.get("dataset.path")}),
            begun=_minute(summary.attempts[0].get("started")) if summary.attempts else "",
            questions=None if questions is None else int(questions),
            rows=int(summary.totals.rows) if summary.is_begun else None,
            of_rows=None if to_come is None else int(to_come),
            score=None if score is None else float(score),
            shown_score="" if summary.score is None else _value(summary.score),
            interval="" if summary.score is None else _interval(summary.score),
        )
    except (ConfigError, JobError, OSError) as error:
        return replace(job, fault=str(error))
    # Files that somebody else wrote can have any structure.
    except (ValueError, LookupError, TypeError, AttributeError, RecursionError):
        return replace(job, fault="its manifest.json or metrics.json is damaged")


def _value(scores: Mapping[str, Any]) -> str:
    """Format a score for display; a score of another column than marks has the column's name in
    front."""
    column = f"{scores['column']} " if "column" in scores else ""
    return column + score_value(scores)(scores["avg"]["value"])


def _interval(scores: Mapping[str, Any]) -> str:
    return value_range(scores["avg"]["population"], score_value(scores))


def config_fault(folder: Path) -> str:
    """Return why the configuration of a job cannot be read; empty if it can be."""
    try:
        config = JobFolderReader(folder).config
    except (ConfigError, OSError) as error:
        return str(error)
    return "" if is_config(config) else "its config.yaml is not the configuration of a job"


def _too_large(folder: Path) -> str:
    """Which small file of a job is too large to be read; empty if none is."""
    for name, limit in _MOST_BYTES.items():
        path = folder / name
        if path.is_file() and (size := path.stat().st_size) > limit:
            return f"{name} has {size:,} bytes, more than the {limit:,} that are read"
    return ""


def _text(value: Any) -> str:
    return value if isinstance(value, str) else ""


def _minute(started: Any) -> str:
    """`2026-11-27 10:46` of a time in metrics.json."""
    return _text(started)[:16].replace("T", " ")
