"""Reads and writes the folder `grades` of a job: the columns of `post` steps, in one file for each
shard.

    data/part-00000.parquet      row_id, row_index, sample_index, …, text, …
    grades/part-00000.parquet    row_id, row_index, sample_index, answer, mark, …, grade_error
"""

from __future__ import annotations

import contextlib
import json
from collections.abc import Callable, Collection, Iterator, Sequence
from pathlib import Path

import pyarrow as pa

from batchgen.config.groups.job_config import StepConfig
from batchgen.config.groups.output_config import ScoreConfig
from batchgen.engine.device.host_limits import usable_cores
from batchgen.evals.graders.build_steps import (
    check_fields,
    check_machine,
    post_steps,
    step_descriptions,
)
from batchgen.evals.graders.grade_rows import Grader, StepChain
from batchgen.evals.grades.changed_marks import ChangedMarks
from batchgen.evals.grades.grade_files import (
    ROW_KEYS,
    STEPS_KEY,
    GradePart,
    bytes_digest,
    made_of,
)
from batchgen.evals.grades.grading_pass import GradingPass, Stopped, Witness
from batchgen.storage.shards.checked_file import CheckedFile, DamagedFile, read_schema
from batchgen.storage.shards.shard_files import shard_files, shard_path, unwritable
from batchgen.util.errors import ConfigError

GRADES = "grades"
_STEPS_FILE = "steps.json"
"""A file with the steps, which earlier versions wrote into the folder. It disturbs readers of a
folder of Parquet files."""


class JobGrades:
    """The grades of one job.

    A *part* is the file for one shard. It names the shard and the steps from which it was made.
    Parts that are up to date are kept. So grading continues after a kill, and rows that were
    computed again are graded again. An object remembers the shards that it has read and the parts
    that it has written.

    Attributes:
        job: the job's folder.
        path: the folder of the grades.
    """

    def __init__(self, job: Path, witness: Witness | None = None) -> None:
        """Open the grades. If the steps take columns, `witness` receives each part when it is
        made."""
        self.job, self.path = job, job / GRADES
        self._witness = witness
        # Shard → its inode, size and times, and the digest of its bytes while these are the same.
        self._digests: dict[Path, tuple[tuple[int, ...], str]] = {}
        self._written: dict[GradePart, str] = {}  # part → the steps that it was made by
        self._steps: str | None = None

    @property
    def steps(self) -> str | None:
        """The steps of the grades with their options and versions, as JSON: those of the last pass
        of this object, otherwise those of the first part. None if there are no grades."""
        if self._steps is not None:
            return self._steps
        files = shard_files(self.path).values() if self.path.is_dir() else ()
        values = (made_of(path).get(STEPS_KEY) for path in files)
        return next((steps.decode(errors="replace") for steps in values if steps is not None), None)

    def parts(self, shards: Collection[int] | None = None) -> Iterator[GradePart]:
        """Yield a part for each shard of the job, or for each of these shards, in order."""
        files = shard_files(self.job / "data")
        return map(self.part, (n for n in files if shards is None or n in shards))

    def part(self, number: int) -> GradePart:
        """The part of a shard, which must exist."""
        shard = shard_path(self.job / "data", number)
        stat = shard.stat()
        stamp = (stat.st_ino, stat.st_size, stat.st_mtime_ns, stat.st_ctime_ns)
        known, digest = self._digests.get(shard, (None, ""))
        if known != stamp:
            digest = bytes_digest(shard)
            self._digests[shard] = stamp, digest
        return GradePart(shard, shard_path(self.path, number), digest)

    def _is_made(self, part: GradePart, steps: str) -> bool:
        """Whether a part made by these steps exists."""
        written = self._written.get(part) == steps and part.path.is_file()
        return written or part.is_made_by(steps)

    def finished(self) -> list[GradePart]:
        """The parts of all shards.

        Raises:
            ConfigError: there are no grades, or parts are missing or belong to other steps or rows.
            DamagedFile: a part is damaged.
        """
        steps = self.steps
        if steps is None:
            self._refuse_damaged()
            raise ConfigError(
                f"{self.job} has no grades: `batchgen grade {self.job} post=…` makes them"
            )
        parts = list(self.parts())
        missing = sum(not self._is_made(part, steps) for part in parts)
        if missing:
            self._refuse_damaged()
            raise ConfigError(
                f"{missing} of {len(parts)} shards of {self.job} have no grades, or grades of "
                f"other rows or steps: run `batchgen grade {self.job}` first"
            )
        return parts

    def _refuse_damaged(self) -> None:
        for path in shard_files(self.path).values() if self.path.is_dir() else ():
            read_schema(path)

    def lie_beside(self) -> bool:
        """Whether every shard has a part of the same length, all by the same steps.

        Only the footers of the files are read, so a shard that was computed again is not noticed;
        `finished` reads whole files.
        """
        steps = self.steps
        if steps is None:
            return False
        for number, shard in shard_files(self.job / "data").items():
            path = shard_path(self.path, number)
            if not path.exists():
                return False
            try:
                with CheckedFile(path) as grades, CheckedFile(shard) as rows:
                    stored_steps = (grades.metadata.metadata or {}).get(STEPS_KEY)
                    counts = {grades.metadata.num_rows, rows.metadata.num_rows}
            except DamagedFile:
                return False
            if stored_steps != steps.encode() or len(counts) > 1:
                return False
        return True

    def make(
        self,
        configs: Sequence[StepConfig],
        text_column: str,
        config: ScoreConfig,
        *,
        shards: Collection[int] | None = None,
        stop: Callable[[], bool] = lambda: False,
        changes: ChangedMarks | None = None,
    ) -> int | None:
        """Grade all rows that have no grades by these steps yet. Returns their number, or None if
        it was stopped.

        Args:
            text_column: the column of generated text.
            config: the number of processes for steps that need them, and the time for a row.
            shards: the numbers of the shards to grade; None for all.
            stop: returns whether to stop, see `GradingPass`.
            changes: collects the changes of grades that are replaced.

        Raises:
            ConfigError: a step is wrong, or reads a column that the rows do not have.
            JobError: a shard is damaged, or the grades cannot be written.
        """
        steps = post_steps(configs)
        _check_names(StepChain(steps))
        described = json.dumps(step_descriptions(configs, steps), sort_keys=True)
        pending = [part for part in self.parts(shards) if not self._is_made(part, described)]
        if pending:
            check_fields(steps, read_schema(pending[0].shard).names)
            check_machine(steps)
        self._steps = described
        with contextlib.suppress(OSError):  # the file may stay if it cannot be deleted
            (self.path / _STEPS_FILE).unlink(missing_ok=True)
        if not pending:
            return 0
        try:
            self.path.mkdir(exist_ok=True)
        except OSError as error:
            raise unwritable(self.path, error) from error
        count = config.workers or usable_cores()
        with Grader(steps, workers=count, seconds=config.seconds) as grader:
            grading_pass = GradingPass(grader, described, text_column, stop, self._witness, changes)
            rows = 0
            try:
                for part, number in grading_pass.grade(pending):
                    self._written[part] = described
                    rows += number
            except Stopped:
                return None
            return rows

    def schema(self) -> pa.Schema | None:
        """The columns of the grades; None if there are none."""
        files = shard_files(self.path).values() if self.path.is_dir() else ()
        return next((read_schema(path) for path in files), None)


def _check_names(chain: StepChain) -> None:
    for column in chain.columns:
        if column.name in ROW_KEYS:
            raise ConfigError(
                f"post: a step writes {column.name!r}, which every row has: rename it"
            )
