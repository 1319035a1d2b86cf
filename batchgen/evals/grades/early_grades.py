"""Grades the shards of a job as soon as they are there, because other jobs wait for the grades."""

from __future__ import annotations

import time
from collections.abc import Callable
from pathlib import Path

from batchgen.config.groups.job_config import JobConfig
from batchgen.evals.graders.build_steps import post_steps
from batchgen.evals.graders.grade_rows import StepChain
from batchgen.evals.grades.background_grading import GradingProcess
from batchgen.evals.grades.folder_grades import JobGrades
from batchgen.storage.shards.shard_files import shard_files

_LOOK_SECONDS = 0.1


class EarlyGrades:
    """Grades shards in this process if the steps take columns, else in one beside it.

    Attributes:
        process: the process beside this one, once it is needed.
    """

    def __init__(self, job: Path, config: JobConfig, claim: Callable[[], bool]) -> None:
        """`claim` says whether it is this worker that grades."""
        self._job, self._config, self._claim = job, config, claim
        self._takes_columns = StepChain(post_steps(config.post)).takes_columns
        self._grades = JobGrades(job)
        self._done: set[int] = set()
        self._next_look = 0.0
        self.process: GradingProcess | None = None

    def look(self) -> None:
        """Grade what has come, a few times a second at most.

        Raises:
            ConfigError, JobError: as of `JobGrades.make`.
        """
        if self.process is not None or time.monotonic() < self._next_look:
            return
        self._next_look = time.monotonic() + _LOOK_SECONDS
        new = set(shard_files(self._job / "data")) - self._done
        if not new or not self._claim():
            return
        if not self._takes_columns:
            self.process = GradingProcess(self._job, self._config)
            return
        # Grades by other steps are replaced when the job ends, which says what that changes.
        if missing := {n for n in new if not self._grades.part(n).is_of_shard}:
            config = self._config
            self._grades.make(config.post, config.output.text_column, config.score, shards=missing)
        self._done |= new

    def close(self) -> None:
        """End the process, if it has not ended."""
        if self.process is not None:
            self.process.kill()
