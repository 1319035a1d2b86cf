"""The leaderboard of `batchgen view FOLDER`: a table of arms for each exam, the best first.

An *arm* is a job, or jobs that differ only in their seed; an *exam* is the questions with the way
in which they were asked and marked.
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from threading import Lock

from batchgen.evals.arms.arm_folders import ArmFolder
from batchgen.evals.arms.arm_table import ArmTable, arm_table, best_first
from batchgen.evals.arms.arm_values import table_cells, table_remarks
from batchgen.evals.arms.job_arms import job_arms
from batchgen.pages.viewer.disagreements import MOST_ANSWERS
from batchgen.pages.viewer.jobs_below import JobBelow
from batchgen.storage.folder.read_job import JobFolderReader
from batchgen.util.errors import ConfigError, JobError
from batchgen.util.shorten import beginning

_DAMAGED = (ValueError, LookupError, TypeError, AttributeError, RecursionError)
"""The errors that damaged or foreign files can raise."""
_SHOWN_PROMPT = 120  # characters


@dataclass(frozen=True)
class Board:
    """The arms of one exam.

    Attributes:
        fault: why there is no table.
        prompt: how its prompt begins, where another exam has the same data set.
    """

    dataset: str
    names: tuple[str, ...]
    table: ArmTable | None = None
    fault: str = ""
    prompt: str = ""

    @property
    def cells(self) -> list[tuple[str, ...]]:
        """A header, and a row of texts for each arm."""
        assert self.table is not None
        return table_cells(self.table)

    @property
    def remarks(self) -> list[str]:
        """The remarks that are needed to read the table."""
        assert self.table is not None
        return table_remarks(self.table)

    def jobs(self, index: int) -> tuple[str, ...]:
        """The folders of the jobs of an arm."""
        assert self.table is not None
        return self.table.rows[index].arm.folders


class Leaderboard:
    """Makes the boards of a folder's jobs when they are asked for, and again when a job has
    changed."""

    def __init__(self) -> None:
        self._lock = Lock()
        self._stamps: tuple[tuple[str, int], ...] = ()
        self._boards: list[Board] = []

    def boards(self, jobs: Sequence[JobBelow]) -> list[Board]:
        """The boards of the jobs that are complete and have a score, those with most arms first."""
        scored = [job for job in jobs if job.score is not None and job.state == "complete"]
        stamps = tuple((job.key, _modified(job.path)) for job in scored)
        with self._lock:
            if stamps != self._stamps:
                self._boards, self._stamps = _boards(scored), stamps
            return self._boards


def _modified(job: Path) -> int:
    try:
        return (job / "metrics.json").stat().st_mtime_ns
    except OSError:
        return 0


def _boards(jobs: Sequence[JobBelow]) -> list[Board]:
    exams: dict[str, list[JobBelow]] = {}
    for job in jobs:
        exams.setdefault(_exam(job), []).append(job)
    names = Counter(group[0].short_dataset for group in exams.values())
    boards = []
    for group in exams.values():
        board = _board(group)
        several = names[board.dataset] > 1
        boards.append(replace(board, prompt=_prompt(group[0])) if several else board)
    return sorted(boards, key=lambda board: -len(board.names))


def _prompt(job: JobBelow) -> str:
    """How the template of a job's prompt begins; empty if nothing says it."""
    try:
        prompt = JobFolderReader(job.path).config.get("prompt") or {}
        return beginning(str(prompt.get("user") or prompt.get("text") or ""), _SHOWN_PROMPT)
    except (ConfigError, JobError, *_DAMAGED):
        return ""


def _exam(job: JobBelow) -> str:
    """The key of an exam: the data set, the prompts, and the scored column."""
    try:
        reader = JobFolderReader(job.path)
        prints, config = reader.manifest.get("fingerprints", {}), reader.config
        column = (config.get("score") or {}).get("column")
        same = [job.dataset, prints.get("dataset"), config.get("prompt"), column]
        return json.dumps(same, sort_keys=True, default=str)
    except (ConfigError, JobError, *_DAMAGED):
        return job.key


def _board(jobs: Sequence[JobBelow]) -> Board:
    names, dataset = tuple(job.name for job in jobs), jobs[0].short_dataset
    if large := [job.name for job in jobs if (job.rows or 0) > MOST_ANSWERS]:
        fault = f"{large[0]} has more than {MOST_ANSWERS:,} answers, which is too many for a page"
        return Board(dataset, names, fault=f"{fault}: use batchgen compare")
    folders = [ArmFolder(job.name, str(job.path), listed=True) for job in jobs]
    try:
        arms, column = job_arms(folders)
        return Board(dataset, names, arm_table(best_first(arms), column))
    except (ConfigError, JobError) as error:
        return Board(dataset, names, fault=str(error))
    except _DAMAGED as error:
        return Board(dataset, names, fault=f"a file of these jobs is damaged ({error})")
