"""Grades the shards of a job in a process of its own while the job goes on, which begins with

    python -c PROGRAM SETUP      (see `GradingProcess`)

It only does early what `JobGrades.make` would do at the end of the job, part by part. So it may be
ended at any time, and whatever it could not do, its failures too, is left to that. Steps that take
columns cost so little that all is left to that: beside a job they take twice as long.
"""

from __future__ import annotations

import contextlib
import json
import os
import select
import signal
import subprocess
import sys
from collections.abc import Callable, Generator, Iterator
from dataclasses import asdict
from pathlib import Path

from batchgen.config.groups.job_config import JobConfig, ScoreConfig, StepConfig
from batchgen.evals.graders.grading_worker import die_with
from batchgen.util.errors import ConfigError, JobError

_PROGRAM = (
    "import json, sys; sys.path[:] = json.loads(sys.argv[1])['path']; "
    "from batchgen.evals.grades.background_grading import main; main()"
)
_POLL_SECONDS = 1.0
_STOP_SECONDS = 0.05
_FEW = 2
"""Shards that the job grades itself when it ends."""
_NICE = 10
"""A model on the same CPU goes first."""


class GradingProcess:
    """A process that grades shards as they are published."""

    def __init__(self, job: Path, config: JobConfig) -> None:
        self._job = job
        setup = {
            "path": sys.path,
            "parent": os.getpid(),
            "job": str(job),
            "post": [asdict(step) for step in config.post],
            "score": asdict(config.score),
            "text_column": config.output.text_column,
        }
        # Where the process fails, the end of the job says why. Ctrl-C is for the job alone.
        self._process = subprocess.Popen(
            [sys.executable, "-P", "-c", _PROGRAM, json.dumps(setup)],
            stdin=subprocess.PIPE,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            start_new_session=True,
        )

    def finish(self, stop: Callable[[], bool]) -> Generator[float, None, None]:
        """Let it grade the shards that are there, until its end or until `stop()`; gives seconds to
        wait before it looks again. Where few shards are left it is ended, because their grades cost
        less than its start."""
        from batchgen.evals.grades.folder_grades import GRADES
        from batchgen.storage.shards.shard_files import shard_files

        grades = self._job / GRADES
        graded = shard_files(grades) if grades.is_dir() else {}
        left = set(shard_files(self._job / "data")) - set(graded)
        if len(left) <= _FEW:
            self.kill()
            return
        assert self._process.stdin is not None
        self._process.stdin.close()
        while not stop() and self._process.poll() is None:
            yield _STOP_SECONDS

    def kill(self) -> None:
        """End it at once. May be called again, and after `finish`."""
        self._process.kill()
        self._process.wait()
        if self._process.stdin is not None:
            self._process.stdin.close()


@contextlib.contextmanager
def grading_beside(
    job: Path, config: JobConfig, *, needed: bool
) -> Iterator[GradingProcess | None]:
    """Grade shards while the job goes on in the body; None if that is not needed, or if no step
    needs a process. It ends with the body, at once if the body raises."""
    if not needed or not config.post:
        yield None
        return
    from batchgen.evals.graders.build_steps import post_steps
    from batchgen.evals.graders.grade_rows import StepChain

    if StepChain(post_steps(config.post)).takes_columns:
        yield None
        return
    beside = GradingProcess(job, config)
    try:
        yield beside
    finally:
        beside.kill()


def main() -> None:
    """Grade shards until standard input ends, then those that are left."""
    setup = json.loads(sys.argv[1])
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    die_with(setup["parent"])
    os.nice(_NICE)
    job, post = Path(setup["job"]), [StepConfig(**step) for step in setup["post"]]

    def grade(shards: set[int]) -> None:
        from batchgen.evals.grades.folder_grades import JobGrades  # not before there is work

        grades = JobGrades(job)
        # Grades that are there are replaced when the job ends, which says what that changes.
        if new := {shard for shard in shards if not grades.part(shard).is_of_shard}:
            grades.make(post, setup["text_column"], ScoreConfig(**setup["score"]), shards=new)

    with contextlib.suppress(ConfigError, JobError):
        _serve(job, grade, _input_ends)


def _serve(job: Path, grade: Callable[[set[int]], None], ends: Callable[[], bool]) -> None:
    """Grade shards as they come until `ends`, which waits a while, and then those that are left."""
    done: set[int] = set()
    changed, ended = 0, False
    while not ended:
        ended = ends()
        # A folder of many shards is listed only if one has come.
        before, changed = changed, (job / "data").stat().st_mtime_ns
        if not ended and changed == before:
            continue
        from batchgen.storage.shards.shard_files import shard_files

        if new := set(shard_files(job / "data")) - done:
            grade(new)
            done |= new


def _input_ends() -> bool:
    """Wait a while for the end of standard input."""
    return bool(select.select([sys.stdin], [], [], _POLL_SECONDS)[0])
