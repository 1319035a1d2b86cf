"""Filters, sorts and groups the jobs in the job list of `batchgen view FOLDER`."""

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
"""The columns of the list: the sort key in URLs, and the title."""
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
_DESCENDING = ("begun", *NUMBERS)
"""The columns that are sorted in descending order: latest or largest first."""


@dataclass(frozen=True)
class JobGroup:
    """Jobs under one heading, `folder`: those of one parent folder, such as a sweep or a pipeline.
    In a sorted list, one group without a heading has all jobs."""

    folder: str
    jobs: Sequence[JobBelow]

    def short(self, job: JobBelow) -> str:
        """Return the name of a job as listed under the heading."""
        return job.name.removeprefix(f"{self.folder}/") if self.folder else job.name


@dataclass(frozen=True)
class Listed:
    """The list of jobs that a query asks for.

    Attributes:
        groups: the jobs that match, in groups.
        text: words that the job's name, model or data set must contain; empty for all jobs.
        state: the required state; empty for all jobs.
        sort: the key of one of COLUMNS; empty for the order of the folders.
        states: the states of all jobs, for the menu.
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
        """Return the URL query of this list, with some values replaced."""
        query = {"text": self.text, "state": self.state, "sort": self.sort, **other}
        return {key: value for key, value in query.items() if value}


def listed_jobs(jobs: Sequence[JobBelow], query: Mapping[str, str]) -> Listed:
    """Return the jobs that a query asks for. Raises ConfigError for an unknown sort key."""
    text, state, sort = (query.get(key, "") for key in ("text", "state", "sort"))
    if sort and sort not in _KEYS:
        raise ConfigError(f"sort must be one of {', '.join(_KEYS)}, got {sort[:80]!r}")
    words = text.lower().split()
    chosen = [job for job in jobs if _has(job, words) and state in ("", job.state)]
    if sort:
        key = _KEYS[sort]
        with_value = [job for job in chosen if key(job) is not None]
        with_value.sort(key=key, reverse=sort in _DESCENDING)
        groups = [JobGroup("", [*with_value, *(job for job in chosen if key(job) is None)])]
    else:
        groups = [_group(name, list(some)) for name, some in groupby(chosen, lambda j: j.folder)]
    states = sorted({job.state for job in jobs if job.state})
    return Listed(groups, text, state, sort, states)


def _group(folder: str, jobs: Sequence[JobBelow]) -> JobGroup:
    """Make the group of one folder. A single job needs no heading."""
    return JobGroup(folder if len(jobs) > 1 else "", jobs)


def _has(job: JobBelow, words: Sequence[str]) -> bool:
    """Whether each word occurs in the job's name, model or data set, ignoring case."""
    searched = "\n".join((job.name, job.model, job.dataset)).lower()
    return all(word in searched for word in words)
