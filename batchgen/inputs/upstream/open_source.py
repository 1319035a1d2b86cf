"""Opens the rows of a job, for any `dataset.kind`. The entry point is `open_source`."""

from __future__ import annotations

import sys
from collections.abc import Collection, Mapping, Sequence
from typing import TYPE_CHECKING

from batchgen.config.compose.load_config import resolved
from batchgen.config.groups.job_config import JobConfig
from batchgen.inputs.dataset.source import Source
from batchgen.inputs.upstream.named_columns import named_columns

if TYPE_CHECKING:
    from batchgen.inputs.upstream.followed_job import Promise, ReadableJob


def open_source(
    config: JobConfig,
    promised: Mapping[str, Promise] | None = None,
    *,
    wait: bool = False,
    images: Collection[str] = (),
) -> Source:
    """Open the rows that the configuration names, and check what needs no pass over a stream.

    Args:
        promised, wait: for a job that is followed; see `follow_job`.
        images: the columns that may contain images.

    Raises:
        ConfigError: the rows do not exist, cannot be read, or lack a column that the group
            `dataset` names; or there are none.
        JobError: a file of another job is damaged.
    """
    group = config.dataset
    if group.kind == "count":
        from batchgen.inputs.dataset.counted_rows import CountedRows

        assert group.limit is not None
        return CountedRows(group.limit)
    if group.kind == "job":
        from batchgen.inputs.upstream.job_source import JobSource
        from batchgen.inputs.upstream.read_jobs import follow_job, read_jobs

        folder, promises = config.output.dir, promised or {}
        if group.follow:
            jobs: Sequence[ReadableJob] = [follow_job(group.paths[0], folder, promises, wait)]
        else:
            jobs = read_jobs(group.paths, folder)
        source = JobSource(jobs, group, named_columns(resolved(config)))
        if not (group.follow and group.paths[0] in promises):  # its folder may be of an older run
            source.learn()
            so_far = "so far " * group.follow
            print(f"batchgen: {group.shown}: {so_far}{_described(source)}", file=sys.stderr)
        return source
    from batchgen.inputs.dataset.row_source import open_dataset

    return open_dataset(group, images)


def _described(source: Source) -> str:
    """Return a text with the number of answers, and how many are left after each choice."""
    if not source.funnel:
        return "no answers"
    first, *others = source.funnel
    parts = [f"{first.rows:,} {first.choice}"]
    parts += [f"{left.rows:,} after {left.choice}" for left in others]
    return ", ".join(parts)
