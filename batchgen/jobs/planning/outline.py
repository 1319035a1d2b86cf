"""Opens a job without its weights and reads some of its rows, for a dry run and for a plan
(`outlined`)."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import closing, contextmanager
from dataclasses import dataclass

from batchgen.config.groups.job_config import JobConfig
from batchgen.engine.constraint.constraint import Constraint
from batchgen.engine.interface.constraint_error import ConstraintError
from batchgen.inputs.dataset.source import Row
from batchgen.jobs.forecast.samples_per_row import SamplesPerRow, samples_per_row
from batchgen.jobs.forecast.scan import Scan, scan_rows
from batchgen.jobs.planning.folder_state import FolderState, find_rows, folder_state
from batchgen.jobs.planning.planned_reuse import PlannedReuse, planned_reuse
from batchgen.jobs.resolve.open_job import open_job
from batchgen.jobs.resolve.opened_job import OpenedJob
from batchgen.jobs.run.checked_rows import check_rows, pin_values, row_request
from batchgen.util.errors import ConfigError

_COMPILE_S = 2.0
"""The seconds after which no more constraints are compiled."""


@dataclass(frozen=True, kw_only=True)
class Outline:
    """A job as it would start: some of its rows, and the state of its output folder.

    Attributes:
        config: the job's configuration.
        opened: the job without its weights.
        scan: the rows that were read.
        folder: what the job would do with its folder.
        refusal: why the job would be refused because of its folder; None if it would not.
        samples: the number of samples of a row.
        reuse: the answers that would be copied from older jobs; None if there are no such jobs.
    """

    config: JobConfig
    opened: OpenedJob
    scan: Scan
    folder: FolderState
    refusal: ConfigError | None
    samples: SamplesPerRow
    reuse: PlannedReuse | None

    @property
    def room(self) -> int:
        """The most tokens of a prompt that leave room for the job's longest answer."""
        return self.opened.max_model_len - self.config.sampling.max_new_tokens

    @property
    def full(self) -> int:
        """The number of prompts that leave no room, where prompts that are too long are cut."""
        if self.config.prompt.too_long == "error":
            return 0
        limit = self.opened.max_model_len
        requests = (read.request for read in self.scan.sample)
        return sum(
            len(request.prompt) + request.params.max_new_tokens >= limit for request in requests
        )

    @property
    def rows(self) -> int:
        """The number of rows, or of those that were read if the number of all rows is not known."""
        return self.scan.num_rows or self.scan.looked_at

    @property
    def reused(self) -> int:
        """The number of answers that are copied from older jobs."""
        return 0 if self.reuse is None else self.reuse.answers

    @property
    def answers(self) -> int:
        """The likely number of answers to compute for these rows."""
        likely = round(self.rows * self.samples.number.likely)
        return max(likely - self.folder.done - self.reused, 0)


@contextmanager
def outlined(config: JobConfig) -> Iterator[Outline]:
    """Open a job and read some of its rows. Nothing is written, and no weights are loaded.

    Raises:
        ConfigError: the job would be refused before its folder is looked at.
    """
    with closing(open_job(config)) as opened:
        check_rows(config, opened)
        find_rows(config, opened.source)
        folder, refusal = FolderState(f"{config.output.dir}: refused"), None
        try:
            folder = folder_state(config, opened)
        except ConfigError as error:  # rows are checked all the same
            refusal = error
        # The digest by which an older job's row is found includes that of the row's images.
        with_images = bool(config.output.reuse)
        request = row_request(pin_values(config, opened), opened, with_images=with_images)
        image = None if opened.images is None else opened.images.image_token_id
        scan = scan_rows(opened.source, request, image)
        reuse = planned_reuse(config, opened, scan)
        _check_constraints(opened, scan)
        yield Outline(
            config=config,
            opened=opened,
            scan=scan,
            folder=folder,
            refusal=refusal,
            samples=samples_per_row(config.sampling, folder.complete, folder.samples),
            reuse=reuse,
        )


def _check_constraints(opened: OpenedJob, scan: Scan) -> None:
    """Compile the constraints of the rows, starting with the constraint of most rows. Rows whose
    constraint cannot be enforced are counted as bad."""
    rows: dict[Constraint, list[Row]] = {}
    for read in scan.sample:
        if (constraint := read.request.params.constraint) is not None:
            rows.setdefault(constraint, []).append(read.row)
    if not rows:
        return
    end = time.perf_counter() + _COMPILE_S
    with closing(opened.model.grammar_compiler()) as compiler:
        for constraint in sorted(rows, key=lambda constraint: -len(rows[constraint])):
            try:
                compiler.compile(constraint)
            except ConstraintError as error:
                scan.note_bad("bad_constraint", str(error), rows[constraint])
            if time.perf_counter() > end:
                break
