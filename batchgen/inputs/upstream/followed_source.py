"""The rows of a job that are answers of another job which still runs."""

from __future__ import annotations

import time
from collections.abc import Callable

from batchgen.config.groups.dataset_config import DatasetConfig
from batchgen.inputs.dataset.source import Following
from batchgen.inputs.upstream.chosen_answers import Place
from batchgen.inputs.upstream.followed_job import FollowedJob
from batchgen.inputs.upstream.job_source import JobSource

_LOOK_SECONDS = 0.05


class FollowedSource(JobSource, Following):
    """A `JobSource` of a job that may run: its rows are those of the shards that are ready.

    What is chosen of a shard depends on that shard alone, so the rows are those of a `JobSource` of
    the complete job.
    """

    def __init__(
        self, job: FollowedJob, config: DatasetConfig, named: frozenset[str] | None
    ) -> None:
        """Nothing is read of the job before `learn`; the errors are those of `JobSource`."""
        self._job, self._place = job, Place()
        self._next_look = 0.0
        super().__init__([job], config, named)

    def _begin(self) -> None:
        self._job.needs_grades = self._graded

    @property
    def num_rows(self) -> int | None:
        """See `Source`."""
        return self._total if self._job.is_complete else None

    @property
    def num_ready(self) -> int:
        """See `Following`."""
        return self._total

    @property
    def ends(self) -> list[int]:
        """Behind which of the rows each shard that was taken up ends."""
        return [min(end, self._total) for end in self._ends]

    def learn(self, may_write: Callable[[], bool] = lambda: False) -> bool:
        """See `Following`. It looks a few times a second at most."""
        if self._job.is_complete or time.monotonic() < self._next_look:
            return False
        found = False
        while self._job.learn():
            self._add(0, self._choice.of(self._job, 0, self._place))
            found = True
        self._next_look = time.monotonic() + _LOOK_SECONDS
        if self._job.is_complete:
            self._refuse_empty()
        return found or self._job.is_complete
