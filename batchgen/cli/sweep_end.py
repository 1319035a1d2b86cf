"""Shows the result of a sweep after its jobs: a table of the arms, and a page about them.

An *arm* is a job, or several jobs that differ only in their seed. `hydra_app.py` calls `show_arms`.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from pathlib import Path

from batchgen.storage.stores.open_storage import job_metrics
from batchgen.util.errors import ConfigError, JobError
from batchgen.util.paths import is_url


def show_arms(jobs: Sequence[tuple[str, str]]) -> None:
    """Print the table of arms, and write the sweep's page into the parent folder of its jobs.
    Nothing is shown unless some job has scores. An error becomes a warning, because the rows are
    complete.

    Args:
        jobs: the name and the folder of each job; entries with the same folder are one job.
    """
    folders = list({folder: name for name, folder in jobs if not is_url(folder)}.items())
    if not any("score" in (job_metrics(folder) or {}) for folder, _ in folders):
        return
    from batchgen.evals.arms.arm_folders import ArmFolder
    from batchgen.evals.arms.arm_table import arm_table
    from batchgen.evals.arms.arm_values import table_lines
    from batchgen.evals.arms.job_arms import job_arms

    arms = [ArmFolder(name, folder, listed=True) for folder, name in folders]
    parents = {Path(folder).parent for folder, _ in folders}
    try:
        table = arm_table(*job_arms(arms))
        print("", *table_lines(table), sep="\n")
        if len(parents) == 1 and len(folders) > 1:
            from batchgen.pages.report.sweep_report import write_sweep_report

            (parent,) = parents
            print(f"report: {write_sweep_report(parent, str(parent), table)}")
    except (ConfigError, JobError) as error:
        print(f"batchgen: warning: the jobs are not compared: {error}", file=sys.stderr)
