"""Runs the job of a configuration, in this process or through a launcher. The command `batchgen`
and sweeps use `run_configured`."""

from __future__ import annotations

import sys
from dataclasses import replace
from typing import TYPE_CHECKING, Protocol

if TYPE_CHECKING:
    from batchgen.config.groups.job_config import JobConfig
    from batchgen.inputs.model.kept_weights import KeptWeights


class JobOutcome(Protocol):
    """How a job ended, whether in this process or in a launcher's workers.

    Attributes:
        exit_code: the process's exit code, as `batchgen/__main__.py` lists them.
        stopped_by: the number of the signal that stopped the job; None if none did.
        message: the text to show the user.
    """

    @property
    def exit_code(self) -> int: ...

    @property
    def stopped_by(self) -> int | None: ...

    @property
    def message(self) -> str: ...


def run_configured(config: JobConfig, kept: KeptWeights | None = None) -> JobOutcome:
    """Run the job of a configuration to its end.

    A line is printed before the first slow import. Mistakes in the configuration are found before
    weights load.

    Args:
        kept: holds the weights for the next job of this process; None if there is none.

    Raises:
        ConfigError: there is a mistake in the configuration.
        JobError: the output cannot be written or is damaged.
    """
    if config.launcher is not None:
        from batchgen.jobs.launchers.launch import launch

        return launch(config)
    from batchgen.util.versions import VERSION

    print(
        f"batchgen {VERSION}: reading model {config.model.path} and data set "
        f"{config.dataset.shown} …",
        file=sys.stderr,
        flush=True,
    )
    from batchgen.jobs.resolve.early_checks import check_early

    check_early(config, folder=True)
    # Each import takes seconds: the first loads torch and transformers, the second datasets and
    # pyarrow. `resolve_job` reports a mistake in the model before the second.
    from batchgen.jobs.resolve.open_job import resolve_job

    parts = replace(resolve_job(config), kept=kept)
    from batchgen.jobs.run.run_job import execute_job

    return execute_job(config, parts)
