"""Opens the rows of a job, whatever `dataset.kind` they are of."""

from __future__ import annotations

import sys
from collections.abc import Collection, Mapping
from typing import TYPE_CHECKING

from batchgen.config.compose.load_config import resolved
from batchgen.config.groups.job_config import JobConfig
from batchgen.inputs.dataset.source import Source
from batchgen.inputs.upstream.named_columns import named_columns

if TYPE_CHECKING:
    from batchgen.inputs.upstream.followed_job import Promise


def open_source(
    config: JobConfig,
    promised: Mapping[str, Promise] | None = None,
    *,
    wait: bool = False,
    images: Collection[str] = (),
) -> Source:
    """The rows that the configuration names, with all checks that need no pass over a stream.
    `images` are the columns that may hold images.

    `promised` and `wait` are for a job that is followed; see `follow_job`.

    Raises:
        ConfigError: they do not exist, cannot be read, lack a column that the group `dataset`
            names, or there are none.
        JobError: a file of another job is damaged.
    """
    group = config.dataset
    if group.kind == "count":
        from batchgen.inputs.dataset.counted_rows import CountedRows

        assert group.limit is not None
        return CountedRows(group.limit)
    if group.kind == "job":
        from batchgen.inputs.upstream.job_source import JobSource
        from batchgen.inputs.upstream.read_jobs import read_jobs

        if group.follow:
            from batchgen.inputs.upstream.followed_source import FollowedSource
            from batchgen.inputs.upstream.read_jobs import follow_job

            job = follow_job(group.paths[0], config.output.dir, promised or {}, wait)
            followed = FollowedSource(job, group, named_columns(resolved(config)))
            if group.paths[0] not in (promised or {}):  # else its folder may be of another time
                followed.learn()
                print(f"batchgen: {group.shown}: so far {_said(followed)}", file=sys.stderr)
            return followed
        jobs = read_jobs(group.paths, config.output.dir)
        source = JobSource(jobs, group, named_columns(resolved(config)))
        print(f"batchgen: {group.shown}: {_said(source)}", file=sys.stderr)
        return source
    from batchgen.inputs.dataset.row_source import open_dataset

    return open_dataset(group, images)


def _said(source: Source) -> str:
    """What was read of other jobs, and what each choice has left."""
    if not source.funnel:
        return "no answers"
    first, *others = source.funnel
    parts = [f"{first.rows:,} {first.choice}"]
    parts += [f"{left.rows:,} after {left.choice}" for left in others]
    return ", ".join(parts)
