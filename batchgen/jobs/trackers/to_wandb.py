"""Progress to Weights & Biases, whose key and mode are in its own variables and files
(`wandb login`, WANDB_MODE=offline)."""

from __future__ import annotations

from batchgen.jobs.trackers.trackers import LibraryRun, Run, Tracker


def begin(run: Run) -> Tracker:
    """The run of a job, which goes on if it is there. Nothing of the machine, of the command, of
    the code, of packages and of what is printed is sent."""
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
        host="-",  # else it names the machine
        x_save_requirements=False,
    )
    tracked_run = wandb.init(
        project=run.project, name=run.name, id=run.id, resume="allow", settings=settings
    )
    return LibraryRun(tracked_run)
