"""Runs the job of a configuration, in this process or through a launcher."""

from __future__ import annotations

import sys
from dataclasses import replace
from typing import TYPE_CHECKING, Protocol

if TYPE_CHECKING:
    from batchgen.config.groups.job_config import JobConfig
    from batchgen.inputs.model.kept_weights import KeptWeights


class JobOutcome(Protocol):
    """How a job ended, whether it ran in this process or in others."""

    @property
    def exit_code(self) -> int: ...

    @property
    def stopped_by(self) -> int | None: ...

    @property
    def message(self) -> str: ...


def run_configured(config: JobConfig, kept: KeptWeights | None = None) -> JobOutcome:
    """Run the job of a configuration. A line that it begins is printed before the first slow
    import. Weights are `kept` for the next job of this process, if there may be one."""
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
    # Each import takes seconds: torch and transformers come with the first one, datasets and
    # pyarrow with the second, and a mistake in the model is found before.
    from batchgen.jobs.resolve.open_job import resolve_job

    parts = replace(resolve_job(config), kept=kept)
    from batchgen.jobs.run.run_job import execute_job

    return execute_job(config, parts)
