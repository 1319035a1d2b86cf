"""Lists the jobs of a sweep and their progress, for `batchgen --multirun --dry-run`."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from batchgen.cli.hydra_arguments import hydra_arguments, parent_of_jobs
from batchgen.cli.options import Options
from batchgen.cli.run_options import compose_options, trust_of
from batchgen.cli.sweep import dated_folder, swept
from batchgen.config.compose.load_config import load_config
from batchgen.jobs.resolve.early_checks import check_early
from batchgen.storage.folder.job_summary import JobSummary
from batchgen.storage.stores.open_storage import job_metrics
from batchgen.util.errors import ConfigError
from batchgen.util.paths import is_url
from batchgen.util.text.text_table import columns, counted


def list_jobs(options: Options) -> int:
    """Print the jobs of a sweep with state and folder. Returns 2 if the configuration of a job
    would be refused, else 0."""
    arguments = hydra_arguments(options, sweep=True)
    if not arguments.names:
        raise ConfigError(
            "--dry-run cannot list this sweep: give a finite list of values: a,b or range(…)"
        )
    setting = parent_of_jobs(arguments, options, sweep=True)
    parent = str(dated_folder(options)) if setting == "sweep.dir" else arguments.output_dir
    rows, faults = [("job", "state", "folder")], []
    for values, name in arguments.names.items():
        typed = iter([arguments.typed[value] for value in values])
        words = [
            next(typed) if swept(argument) is not None else argument
            for argument in options.overrides
        ]
        try:
            groups = compose_options(options, words).groups
            folder = _folder(parent, name) if setting else str(groups["output"]["dir"])
            config = load_config(_within(groups, folder), trust_of(options, words))
            check_early(config, folder=True)
        except ConfigError as error:
            rows.append((name or ".", "refused", ""))
            faults.append(f"{name or '.'}: {error}")
        else:
            rows.append((name or ".", _state(folder), folder))
    print("\n".join([counted(len(rows) - 1, "job"), "", *columns(rows, numbers=False)]))
    if faults:
        print("", *faults, sep="\n")
    return 2 if faults else 0


def _folder(parent: Any, name: str) -> str:
    """Return the folder `name` in `parent`, which may be a URL."""
    return f"{parent}/{name}" if is_url(str(parent)) else str(Path(parent) / name)


def _within(groups: dict[str, Any], folder: str) -> dict[str, Any]:
    """Return the groups with another `output.dir`."""
    return {**groups, "output": {**groups["output"], "dir": folder}}


def _state(folder: str) -> str:
    """Return the state of a job's folder: its status and number of rows, or `?` for a URL."""
    if is_url(folder):
        return "?"
    metrics = job_metrics(folder) if Path(folder).is_dir() else None
    if metrics is None:
        return "not begun"
    summary = JobSummary.of(metrics)
    total = summary.rows_total
    of_total = "" if total is None or summary.status == "complete" else f" of {total:,}"
    return f"{summary.status}, {summary.totals.rows:,}{of_total} rows"
