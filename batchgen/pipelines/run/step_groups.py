"""Groups the steps of a pipeline that can share an engine, and finds the steps that can begin.
`run_steps` uses `StepGroups`."""

from __future__ import annotations

import math
from collections.abc import Collection
from contextlib import closing
from dataclasses import asdict, replace

from batchgen.config.groups.job_config import JobConfig
from batchgen.config.groups.workers_config import WorkersConfig
from batchgen.pipelines.run.open_pipeline import OpenPipeline
from batchgen.storage.folder.refused_folder import written_manifest
from batchgen.storage.leases.lease_files import DATA, LEASES, parse_lease
from batchgen.storage.shards.shard_files import shard_files
from batchgen.storage.stores.folder_storage import names_in
from batchgen.storage.stores.manifest import ROWS, runs_of_row
from batchgen.storage.stores.open_storage import open_storage
from batchgen.util.paths import is_url


class StepGroups:
    """The steps of a pipeline, grouped by the recipe of their engine.

    Attributes:
        steps: recipe (`OpenPipeline.engine_of`) → the names of the steps, in the pipeline's order.
    """

    def __init__(self, opened: OpenPipeline) -> None:
        self._opened = opened
        self.steps: dict[str, list[str]] = {}
        for name in opened.pipeline.steps:
            self.steps.setdefault(opened.engine_of(name), []).append(name)

    def follows(self, name: str) -> bool:
        """Whether a step begins while its parent still runs. This depends only on the pipeline, so
        all workers agree. Only a job in a folder of this machine can be followed, and only a step
        with the same engine runs together with its parent."""
        steps, step = self._opened.pipeline.steps, self._opened.pipeline.steps[name]
        # `waits`: the pipeline says `after: complete`.
        if len(step.parents) != 1 or step.waits or is_url(self._opened.pipeline.out):
            return False
        (parent,) = step.parents
        of_engine = self._opened.engine_of
        # A table must be complete before the first row is joined with it.
        if of_engine(parent) != of_engine(name) or parent in step.tables.values():
            return False
        return not steps[parent].config.output.retry_errors  # a retry changes finished shards

    def is_followed(self, name: str) -> bool:
        """Whether another step follows this one."""
        steps = self._opened.pipeline.steps.items()
        return any(step.parents == (name,) and self.follows(other) for other, step in steps)

    def config(self, name: str) -> JobConfig:
        """Return the job of a step, with dataset.follow set."""
        config = self._opened.config(name)
        return replace(config, dataset=replace(config.dataset, follow=self.follows(name)))

    def ready(self, group: str, complete: Collection[str]) -> list[str]:
        """Return the steps of a group that are not complete and can run.

        Args:
            complete: the steps that are complete.
        """
        names: list[str] = []
        for name in self.steps[group]:
            step = self._opened.pipeline.steps[name]
            # A step that follows its parent can begin together with it.
            begun = {*complete, *(names if self.follows(name) else ())}
            is_ready = set(step.parents) <= begun and set(step.tables.values()) <= {*complete}
            if name not in complete and is_ready:
                names.append(name)
        return names

    def next(self, complete: Collection[str]) -> str | None:
        """Return the group to run next; None if all steps are complete. Of several groups that can
        run, the one with the most shards that no worker has begun is chosen, and the first of equal
        ones.

        Args:
            complete: the steps that are complete.
        """
        ready = {group: self.ready(group, complete) for group in self.steps}
        groups = [group for group, names in ready.items() if names]
        if len(groups) < 2:
            return next(iter(groups), None)
        return max(groups, key=lambda group: sum(map(self._num_free, ready[group])))

    def _num_free(self, name: str) -> float:
        """Return the number of shards of a step that no worker has begun; infinite if unknown."""
        config = self._opened.config(name)
        with closing(open_storage(config.output.dir, WorkersConfig())) as storage:
            manifest = written_manifest(storage)
            # The number of rows of the data set, which is unknown until the job has counted them.
            data_rows = None if manifest is None else manifest.growing.get(ROWS)
            if data_rows is None or manifest is None:
                return math.inf
            # With several adapters, each row of the data set is an output row of each of them.
            rows = int(data_rows) * runs_of_row(asdict(manifest))
            leases = [parse_lease(lease) for lease in names_in(storage, LEASES)]
            # Leases of numbers below 0 are not for shards.
            begun = {shard for shard, _, _ in filter(None, leases) if shard >= 0}
            finished = shard_files(storage.path / DATA, names_in(storage, DATA))
            shards = -(-rows // config.output.rows_per_shard)
            return max(0, shards - len(begun | set(finished)))
