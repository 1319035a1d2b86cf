"""Filters, sorts and groups the jobs of the viewer's list."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import groupby
from typing import Any

from batchgen.pages.viewer.jobs_below import JobBelow
from batchgen.util.errors import ConfigError

COLUMNS = (
    ("name", "Job"), ("state", "State"), ("begun", "Begun"), ("model", "Model"),
    ("dataset", "Data set"), ("questions", "Questions"), ("answers", "Answers"), ("score", "Score"),
)  # fmt: skip
"""The columns of the list: the word by which they sort, and their title."""
NUMBERS = ("questions", "answers", "score")
_KEYS: Mapping[str, Callable[[JobBelow], Any]] = {
    "name": lambda job: job.name,
    "state": lambda job: job.state or None,
    "begun": lambda job: job.begun or None,
    "model": lambda job: job.short_model.lower() or None,
    "dataset": lambda job: job.short_dataset.lower() or None,
    "questions": lambda job: job.questions,
    "answers": lambda job: job.rows,
    "score": lambda job: job.score,
}
_FALLING = ("begun", *NUMBERS)
"""Columns that begin with the latest or largest."""


@dataclass(frozen=True)
class JobGroup:
    """Jobs under one heading: those of one folder, as a sweep's or a pipeline's; all of them,
    without a heading, where the list is sorted."""

    folder: str
    jobs: Sequence[JobBelow]

    def short(self, job: JobBelow) -> str:
        """What a job is called below the heading."""
        return job.name.removeprefix(f"{self.folder}/") if self.folder else job.name


@dataclass(frozen=True)
class Listed:
    """The list of jobs that a query asks for.

    Attributes:
        text: what names, models or data sets have to have in them.
        state: that the jobs have to be in; empty for all.
        sort: one of COLUMNS; empty for the order of the folders.
        states: in which some job is.
    """

    groups: Sequence[JobGroup]
    text: str
    state: str
    sort: str
    states: Sequence[str]

    @property
    def jobs(self) -> Iterator[JobBelow]:
        for group in self.groups:
            yield from group.jobs

    def query(self, **other: str) -> dict[str, str]:
        """The query of this list, with other values."""
        query = {"text": self.text, "state": self.state, "sort": self.sort, **other}
        return {key: value for key, value in query.items() if value}


def listed_jobs(jobs: Sequence[JobBelow], query: Mapping[str, str]) -> Listed:
    """The jobs that a query asks for. ConfigError for an unknown order."""
    text, state, sort = (query.get(key, "") for key in ("text", "state", "sort"))
    if sort and sort not in _KEYS:
        raise ConfigError(f"sort must be one of {', '.join(_KEYS)}, got {sort[:80]!r}")
    words = text.lower().split()
    chosen = [job for job in jobs if _has(job, words) and state in ("", job.state)]
    if sort:
        key = _KEYS[sort]
        known = [job for job in chosen if key(job) is not None]
        known.sort(key=key, reverse=sort in _FALLING)
        groups = [JobGroup("", [*known, *(job for job in chosen if key(job) is None)])]
    else:
        groups = [_group(name, list(some)) for name, some in groupby(chosen, lambda j: j.folder)]
    states = sorted({job.state for job in jobs if job.state})
    return Listed(groups, text, state, sort, states)


def _group(folder: str, jobs: Sequence[JobBelow]) -> JobGroup:
    """The jobs of a folder; one alone needs no heading."""
    return JobGroup(folder if len(jobs) > 1 else "", jobs)


def _has(job: JobBelow, words: Sequence[str]) -> bool:
    """Whether each word is in the job's name, its model or its data set."""
    everything = "\n".join((job.name, job.model, job.dataset)).lower()
    return all(word in everything for word in words)
