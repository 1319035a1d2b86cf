"""Opens the rows of a job, whatever `dataset.kind` they are of."""

from __future__ import annotations

import sys
from collections.abc import Collection

from batchgen.compose.load_config import resolved
from batchgen.config.job_config import JobConfig
from batchgen.dataset.source import Source
from batchgen.upstream.named_columns import named_columns


def open_source(config: JobConfig, images: Collection[str] = ()) -> Source:
    """The rows that the configuration names, with all checks that need no pass over a stream.
    `images` are the columns that may hold images.

    Raises:
        ConfigError: they do not exist, cannot be read, lack a column that the group `dataset`
            names, or there are none.
        JobError: a file of another job is damaged.
    """
    group = config.dataset
    if group.kind == "count":
        from batchgen.dataset.counted_rows import CountedRows

        assert group.limit is not None
        return CountedRows(group.limit)
    if group.kind == "job":
        from batchgen.upstream.job_source import JobSource
        from batchgen.upstream.read_jobs import read_jobs

        jobs = read_jobs(group.paths, config.output.dir)
        source = JobSource(jobs, group, named_columns(resolved(config)))
        print(f"batchgen: {group.shown}: {_said(source)}", file=sys.stderr)
        return source
    from batchgen.dataset.row_source import open_dataset

    return open_dataset(group, images)


def _said(source: Source) -> str:
    """What was read of other jobs, and what each choice has left."""
    first, *others = source.funnel
    parts = [f"{first.rows:,} {first.choice}"]
    parts += [f"{left.rows:,} after {left.choice}" for left in others]
    return ", ".join(parts)
