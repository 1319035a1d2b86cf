"""A tracker that sends the progress to Weights & Biases (`progress.report_to=wandb`).

The key and the mode come from the environment variables and files of wandb (`wandb login`,
WANDB_MODE=offline).
"""

from __future__ import annotations

from batchgen.jobs.trackers.trackers import LibraryRun, Run, Tracker


def begin(run: Run) -> Tracker:
    """Begin the run of a job, or continue it if wandb has it already.

    Only the progress is sent: nothing about the machine, the command, the code, the packages or the
    printed output.
    """
    import wandb

    settings = wandb.Settings(
        console="off",
        silent=True,
        disable_code=True,
        disable_git=True,
        disable_job_creation=True,
        save_code=False,
        x_disable_meta=True,
        x_disable_stats=True,
        x_disable_machine_info=True,
        host="-",  # otherwise wandb sends the machine's name
        x_save_requirements=False,
    )
    tracked_run = wandb.init(
        project=run.project, name=run.name, id=run.id, resume="allow", settings=settings
    )
    return LibraryRun(tracked_run)
