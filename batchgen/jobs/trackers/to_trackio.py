"""A tracker that sends the progress to trackio (`progress.report_to=trackio`).

Trackio keeps the values in files on this machine (TRACKIO_DIR), unless its environment variables
name a Space or a server.
"""

from __future__ import annotations

from batchgen.jobs.trackers.trackers import LibraryRun, Run, Tracker


def begin(run: Run) -> Tracker:
    """Begin the run of a job, or continue it if trackio has it already. No facts about the machine
    are sent."""
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
