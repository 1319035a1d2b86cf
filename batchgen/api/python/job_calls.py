"""Runs jobs from Python: `run_job` takes the same keys as the command `batchgen`."""

from __future__ import annotations

import signal
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from batchgen.api.python.configured_job import JobOutcome
from batchgen.config.compose.compose_config import compose
from batchgen.config.groups.job_config import JobConfig
from batchgen.jobs.resolve.early_checks import check_early
from batchgen.storage.stores.open_storage import job_metrics
from batchgen.util.errors import ConfigError, JobError
from batchgen.util.paths import folder_here
from batchgen.util.text.text_table import counted

if TYPE_CHECKING:
    from datasets import Dataset


class Summary(dict[str, Any]):
    """The figures of a complete job, under the keys of metrics.json: `rows`, `error_rows`,
    `finish_reasons`, `errors`, `prompt_tokens`, `generated_tokens`, `tokens_per_s` and so on.

    As text (`print(summary)`) it is the table that the command shows at the end.
    """

    def __init__(self, figures: Mapping[str, Any], text: str) -> None:
        super().__init__(figures)
        self._text = text

    def __str__(self) -> str:
        return self._text


@dataclass(frozen=True, repr=False)
class CompleteJob:
    """A job whose rows are all in its output folder.

    Attributes:
        path: the output folder.
        exit_code: 0 if every row has an answer, 3 if some rows have an error.
        summary: the job's figures.
    """

    path: Path
    exit_code: int
    summary: Summary

    def dataset(self, *, grades: bool = False) -> Dataset:
        """Load the rows as a data set that is memory-mapped from the files.

        Args:
            grades: whether to add the columns of the grades, such as `mark`. If a row column has
                the same name, the grade column is named `grades_NAME`.

        Raises:
            ConfigError: the job has no grades, or they belong to other rows.
        """
        from datasets import load_dataset

        rows = load_dataset(str(self.path), split="train")
        return _with_grades(rows, self.path) if grades else rows

    def __repr__(self) -> str:
        rows, errors = self.summary["rows"], self.summary["error_rows"]
        figures = f"{counted(rows, 'answer')}, {counted(errors, 'error')}"
        return f"CompleteJob({str(self.path)!r}, {figures}, exit_code={self.exit_code})"


def _with_grades(rows: Dataset, folder: Path) -> Dataset:
    """Return the rows of a job with the columns of its grades. Raises ConfigError if these are
    missing or belong to other rows."""
    from datasets import concatenate_datasets, load_dataset

    from batchgen.evals.grades.folder_grades import GRADES, JobGrades
    from batchgen.storage.folder.how_to_read import GRADE_KEYS
    from batchgen.storage.shards.row_order import KEYS

    if not JobGrades(folder).lie_beside():
        raise ConfigError(
            f"{folder} has no grades of all its rows: batchgen grade {folder} makes them"
        )
    grades = load_dataset("parquet", data_files=f"{folder}/{GRADES}/*.parquet", split="train")
    if any(rows.data.column(key) != grades.data.column(key) for key in KEYS):
        raise ConfigError(f"{folder}/{GRADES} is of other rows: run batchgen grade {folder}")
    grades = grades.remove_columns(list(GRADE_KEYS))
    taken = {name: f"{GRADES}_{name}" for name in grades.column_names if name in rows.column_names}
    return concatenate_datasets([rows, grades.rename_columns(taken)], axis=1)


def run_job(job: Mapping[str, Any], overrides: Sequence[str] = ()) -> CompleteJob:
    """Run a job to its end, or go on with one that was stopped: the same call resumes.

        result = run_job({
            "model": {"path": "Qwen/Qwen3-0.6B"},
            "dataset": {"path": "rows.jsonl"},
            "prompt.user": "{{ question }}",
            "sampling.n": 4,
            "output.dir": "out",
        })
        print(result.summary)
        rows = result.dataset()

    Args:
        job: the keys of a job file, as mappings in mappings, with their full names, or both.
        overrides: arguments `key=value` as on the command line; they go before `job`.

    Raises:
        ConfigError: there is a mistake in the job.
        JobError: the output cannot be written or is damaged, or the budget is spent. Finished rows
            are safe.
        KeyboardInterrupt: Ctrl-C stopped the job. Finished rows are safe.
        SystemExit: SIGTERM stopped the job. Finished rows are safe.
    """
    config = compose(job, overrides)
    folder_here(config.output.dir, "run_job")
    if config.launcher is not None:
        from batchgen.jobs.launchers.launch import launch

        return _completed(config, launch(config))
    # Check before the imports, which load torch and datasets and take seconds.
    check_early(config, folder=True)
    from batchgen.jobs.resolve.open_job import resolve_job
    from batchgen.jobs.run.run_job import execute_job as run

    return _completed(config, run(config, resolve_job(config)))


def _completed(config: JobConfig, result: JobOutcome) -> CompleteJob:
    """Convert the outcome of a job that `run_job` ran. Raises the exceptions that `run_job`
    lists."""
    if result.exit_code in (1, 2, 4):  # 1, 2: a launcher's; its workers have printed why
        raise JobError(result.message)
    # A caller who was told to stop must not go on as if the job were complete.
    if result.stopped_by == signal.SIGINT:
        raise KeyboardInterrupt(result.message)
    if result.stopped_by is not None:
        raise SystemExit(result.exit_code)
    folder = Path(config.output.dir).absolute()
    figures = job_metrics(str(folder))
    assert figures is not None, "a complete job has figures"
    del figures["attempts"]
    return CompleteJob(folder, result.exit_code, Summary(figures, result.message))
