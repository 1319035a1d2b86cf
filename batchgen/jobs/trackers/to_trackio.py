"""Progress to trackio, which keeps it in files on this machine (TRACKIO_DIR) unless its own
variables name a Space or a server."""

from __future__ import annotations

from batchgen.jobs.trackers.trackers import LibraryRun, Run, Tracker


def begin(run: Run) -> Tracker:
    """The run of a job, which goes on if it is there. Nothing of the machine is sent."""
    import trackio

    tracked_run = trackio.init(
        run.project,
        name=run.name,
        resume="allow",
        embed=False,
        auto_log_gpu=False,
        auto_log_cpu=False,
    )
    return LibraryRun(tracked_run)
