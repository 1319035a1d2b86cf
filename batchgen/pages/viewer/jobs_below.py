"""Finds the jobs below a folder, with the facts that the viewer's list shows.

The folder may come from a stranger: links are not followed, and depth, the sizes of files and the
numbers of jobs and of entries are limited.
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
"""Folders between the given one and a job's, the job's included."""
MOST_JOBS = 500
MOST_ENTRIES = 50_000
_MOST_BYTES = {"manifest.json": 2**26, "metrics.json": 2**24, "config.yaml": 2**20}


@dataclass(frozen=True)
class JobBelow:
    """One job in the list."""

    key: str  # names it in addresses, as long as the job has its place
    name: str  # its folder, from the given one on
    path: Path
    fault: str = ""  # why nothing can be shown of it
    state: str = ""
    model: str = ""
    dataset: str = ""
    begun: str = ""  # the date and time (UTC), to the minute
    questions: int | None = None  # input rows
    rows: int | None = None  # answers that are finished
    of_rows: int | None = None  # of a job that is not complete
    score: float | None = None
    shown_score: str = ""
    interval: str = ""  # of 95%, for new questions

    @property
    def folder(self) -> str:
        """The folder that the job's own lies in; empty for the given one."""
        return self.name.rpartition("/")[0]

    @property
    def short_model(self) -> str:
        return short_name(self.model)

    @property
    def short_dataset(self) -> str:
        return ", ".join(map(short_name, self.dataset.split(", ")))


@dataclass
class Below:
    """What lies below a folder."""

    jobs: list[JobBelow] = field(default_factory=list)  # by name
    empty: list[str] = field(default_factory=list)  # folders right below it without a job
    links: list[str] = field(default_factory=list)  # to folders, not followed
    is_cut: bool = False  # a bound ended the walk before all was seen


def jobs_below(folder: Path) -> Below:
    """The jobs below a folder, those deeper than DEEPEST left out. Jobs inside of jobs are none."""
    below, walk = Below(), _Walk()
    for entry in walk.entries(folder, below):
        before = len(below.jobs)
        _look(Path(entry), entry.name, DEEPEST, walk, below)
        if len(below.jobs) == before:
            below.empty.append(entry.name)
    below.links.sort()
    return below


class _Walk:
    """Counts what is looked at."""

    def __init__(self) -> None:
        self._left = MOST_ENTRIES

    def entries(self, folder: Path, below: Below, name: str = "") -> Iterator[os.DirEntry[str]]:
        """The folders in a folder, in order, as far as bounds allow it."""
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


def _look(folder: Path, name: str, depth: int, walk: _Walk, below: Below) -> None:
    """Add the job in a folder; where it has none, those below."""
    if os.path.lexists(folder / "manifest.json"):
        below.jobs.append(_job(folder, name))
    elif depth > 1:
        for entry in walk.entries(folder, below, f"{name}/"):
            _look(Path(entry), f"{name}/{entry.name}", depth - 1, walk, below)


def _job(folder: Path, name: str) -> JobBelow:
    key = blake2b(os.fsencode(name), digest_size=8).hexdigest()
    job = JobBelow(key, name, folder)
    try:
        reader = JobFolderReader(folder)
        if fault := _too_large(folder):
            return replace(job, fault=fault)
        # The configuration says the same, but takes milliseconds to read.
        manifest, known = Manifest.read(folder / "manifest.json"), JobSummary.of(reader.metrics)
        dataset = manifest.identity.get("dataset") or {}
        to_come, score = rows_to_come(known), known.mean_mark if known.score else None
        questions = num_questions(manifest, reader.row_facts)
        return replace(
            job,
            state=str(known.status),
            model=_text(manifest.growing.get("model.path")),
            dataset=dataset_name({**dataset, "path": manifest.growing.get("dataset.path")}),
            begun=_minute(known.attempts[0].get("started")) if known.attempts else "",
            questions=None if questions is None else int(questions),
            rows=int(known.totals.rows) if known.is_begun else None,
            of_rows=None if to_come is None else int(to_come),
            score=None if score is None else float(score),
            shown_score="" if known.score is None else _value(known.score),
            interval="" if known.score is None else _interval(known.score),
        )
    except (ConfigError, JobError, OSError) as error:
        return replace(job, fault=str(error))
    # What somebody else wrote can have any shape.
    except (ValueError, LookupError, TypeError, AttributeError, RecursionError):
        return replace(job, fault="its manifest.json or metrics.json is damaged")


def _value(scores: Mapping[str, Any]) -> str:
    """A score for people; of other numbers than marks with the column's name."""
    column = f"{scores['column']} " if "column" in scores else ""
    return column + score_value(scores)(scores["avg"]["value"])


def _interval(scores: Mapping[str, Any]) -> str:
    return value_range(scores["avg"]["population"], score_value(scores))


def config_fault(folder: Path) -> str:
    """Why the configuration of a job cannot be read; empty if it can."""
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
