"""The leaderboard of `batchgen view FOLDER`: a table of arms for each exam, the best arm first.

An *arm* is a job, or several jobs that differ only in their seed. An *exam* is a set of questions
together with the way in which they are asked and marked.
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
    """The table of the arms of one exam.

    Attributes:
        dataset: the short name of the data set.
        names: the names of the jobs.
        table: the arms with their scores; None if `fault` says why there is none.
        fault: why there is no table; empty if there is one.
        prompt: the beginning of the exam's prompt; set only if another exam has the same data set.
    """

    dataset: str
    names: tuple[str, ...]
    table: ArmTable | None = None
    fault: str = ""
    prompt: str = ""

    @property
    def cells(self) -> list[tuple[str, ...]]:
        """The header row, then a row of texts for each arm."""
        assert self.table is not None
        return table_cells(self.table)

    @property
    def remarks(self) -> list[str]:
        """The remarks that are needed to read the table."""
        assert self.table is not None
        return table_remarks(self.table)

    def jobs(self, index: int) -> tuple[str, ...]:
        """Return the folders of the jobs of an arm, by the arm's row in the table."""
        assert self.table is not None
        return self.table.rows[index].arm.folders


class Leaderboard:
    """Makes the boards of a folder's jobs on request, and caches them until a job changes."""

    def __init__(self) -> None:
        self._lock = Lock()
        self._stamps: tuple[tuple[str, int], ...] = ()
        self._boards: list[Board] = []

    def boards(self, jobs: Sequence[JobBelow]) -> list[Board]:
        """Return the boards of the complete jobs that have a score, those with the most jobs
        first."""
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
        is_ambiguous = names[board.dataset] > 1
        boards.append(replace(board, prompt=_prompt(group[0])) if is_ambiguous else board)
    return sorted(boards, key=lambda board: -len(board.names))


def _prompt(job: JobBelow) -> str:
    """Return the beginning of a job's prompt template; empty if it cannot be read."""
    try:
        prompt = JobFolderReader(job.path).config.get("prompt") or {}
        return beginning(str(prompt.get("user") or prompt.get("text") or ""), _SHOWN_PROMPT)
    except (ConfigError, JobError, *_DAMAGED):
        return ""


def _exam(job: JobBelow) -> str:
    """Return a key that is equal for jobs of one exam: data set, prompt and scored column."""
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
