"""A tracker that sends the progress to trackio. That keeps it in files on this machine
(TRACKIO_DIR) unless trackio's environment variables name a Space or a server."""

from __future__ import annotations

from batchgen.jobs.trackers.trackers import LibraryRun, Run, Tracker


def begin(run: Run) -> Tracker:
    """Begin the run of a job, or continue it if trackio has it. Nothing about the machine is
    sent."""
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
