"""Grades the shards of a job while it runs, in this process or in another one, which is started by

    python -c PROGRAM SETUP      (see `GradingQueue`)

and looks for new shards whenever its standard input has bytes. It only does in advance what
`JobGrades.make` does at the end of the job. So it may be ended at any time, and shards that it
could not grade, or failed on, are graded then.
"""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Collection, Generator, Sequence
from dataclasses import asdict
from pathlib import Path

from batchgen.config.groups.job_config import JobConfig, StepConfig
from batchgen.config.groups.output_config import ScoreConfig
from batchgen.evals.graders.build_steps import post_steps
from batchgen.evals.graders.grade_rows import StepChain
from batchgen.evals.graders.grading_worker import die_with
from batchgen.evals.grades.folder_grades import JobGrades
from batchgen.storage.shards.shard_files import shard_files
from batchgen.util.errors import ConfigError, JobError

# The program of the process; its argument is the SETUP that `_start` writes, as JSON.
_PROGRAM = (
    "import json, sys; sys.path[:] = json.loads(sys.argv[1])['path']; "
    "from batchgen.evals.grades.grading_queue import main; main()"
)
_LOOK_SECONDS = 0.1  # between two looks for new shards
_STOP_SECONDS = 0.05  # between two looks whether to stop
_FEW = 2
"""The number of shards up to which the job grades them itself at its end, which is faster than
waiting for the process."""
_NICE = 10
"""The priority of the process, below that of a model on the same CPU."""


class GradingQueue:
    """Grades shards of a job soon after they are published.

    Steps that take columns are fast, but take twice as long while the job runs. So their shards
    wait for the end of the job, unless other jobs wait for the grades. All other steps run in
    another process, which begins with the first shard.
    """

    def __init__(
        self,
        job: Path,
        config: JobConfig,
        claim: Callable[[], bool],
        *,
        needed: bool,
        at_once: bool,
    ) -> None:
        """Prepare to grade.

        Args:
            claim: returns whether this worker is the one that grades; called when a shard was
                published.
            needed: whether to grade anything before the end.
            at_once: whether other jobs wait for the grades.
        """
        self._job, self._config, self._claim = job, config, claim
        self._takes_columns = StepChain(post_steps(config.post)).takes_columns
        self._is_on = needed and bool(config.post) and (at_once or not self._takes_columns)
        self._grades = JobGrades(job)
        self._done: set[int] = set()  # shards that are graded or that the process was told to grade
        self._changed, self._next_look = 0, 0.0
        self._process: subprocess.Popen[bytes] | None = None

    def look(self) -> None:
        """Grade new shards or let the process grade them, at most a few times a second.

        Raises:
            ConfigError, JobError: see `JobGrades.make`.
        """
        if not self._is_on or time.monotonic() < self._next_look:
            return
        self._next_look = time.monotonic() + _LOOK_SECONDS
        # A folder of many shards is listed only if it has changed.
        try:
            changed = (self._job / "data").stat().st_mtime_ns
        except FileNotFoundError:  # the writer of shards reports it
            return
        if changed == self._changed:
            return
        new = set(shard_files(self._job / "data")) - self._done
        if new and not self._claim():
            return
        self._changed = changed
        if self._takes_columns:
            config = self._config
            _grade(self._grades, config.post, config.output.text_column, config.score, new)
        elif new:
            self._wake()
        self._done |= new

    def _wake(self) -> None:
        """Make the process look for new shards as soon as it has graded the earlier ones."""
        if self._process is None:
            self._process = self._start()
        assert self._process.stdin is not None
        # BrokenPipeError: the process has failed; grading at the end of the job reports the reason.
        # If the pipe is full, the process will look anyway when it reads the earlier bytes.
        with contextlib.suppress(BrokenPipeError):
            self._process.stdin.write(b"\n")

    def _start(self) -> subprocess.Popen[bytes]:
        """Start the process that grades, see `main`."""
        config = self._config
        setup = {
            "path": sys.path,
            "parent": os.getpid(),
            "job": str(self._job),
            "post": [asdict(step) for step in config.post],
            "score": asdict(config.score),
            "text_column": config.output.text_column,
        }
        # If the process fails, grading at the end of the job reports the reason. In another session
        # it does not get Ctrl-C.
        process = subprocess.Popen(
            [sys.executable, "-P", "-c", _PROGRAM, json.dumps(setup)],
            bufsize=0,
            stdin=subprocess.PIPE,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            start_new_session=True,
        )
        assert process.stdin is not None
        os.set_blocking(process.stdin.fileno(), False)  # only this end of the pipe
        return process

    def finish(self, stop: Callable[[], bool]) -> Generator[float, None, None]:
        """Wait until the process has graded all shards, or until `stop()`; yields the seconds until
        it looks again.

        If few shards are left, or the process was not started, the end of the job grades the rest.
        """
        if self._process is None:
            return
        self._next_look = 0.0
        self.look()
        graded = shard_files(self._grades.path) if self._grades.path.is_dir() else {}
        left = set(shard_files(self._job / "data")) - set(graded)
        if len(left) <= _FEW:
            self.close()
            return
        assert self._process.stdin is not None
        self._process.stdin.close()
        while not stop() and self._process.poll() is None:
            yield _STOP_SECONDS

    def close(self) -> None:
        """Kill the process, if there is one."""
        if self._process is not None:
            self._process.kill()
            self._process.wait()
            assert self._process.stdin is not None
            self._process.stdin.close()


def _grade(
    grades: JobGrades,
    post: Sequence[StepConfig],
    text_column: str,
    score: ScoreConfig,
    shards: Collection[int],
) -> None:
    """Grade shards that have no grades. Grades by other steps are replaced at the end of the job,
    which reports changed marks."""
    if missing := {shard for shard in shards if not grades.part(shard).is_of_shard}:
        grades.make(post, text_column, score, shards=missing)


def main() -> None:
    """Grade new shards whenever standard input has bytes, until its end."""
    setup = json.loads(sys.argv[1])
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    die_with(setup["parent"])
    os.nice(_NICE)
    job, done = Path(setup["job"]), set[int]()
    grades, post = JobGrades(job), [StepConfig(**step) for step in setup["post"]]
    with contextlib.suppress(ConfigError, JobError, FileNotFoundError):
        while os.read(sys.stdin.fileno(), 2**16):
            new = set(shard_files(job / "data")) - done
            _grade(grades, post, setup["text_column"], ScoreConfig(**setup["score"]), new)
            done |= new
