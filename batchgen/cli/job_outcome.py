"""Runs one job of the command line and tells the user how it ended."""

from __future__ import annotations

import os
import sys
import traceback
import warnings
from collections.abc import Callable
from typing import TYPE_CHECKING, Protocol

from batchgen.util.errors import ConfigError, JobError

if TYPE_CHECKING:
    from batchgen.config.job_config import JobConfig


class Result(Protocol):
    """How a job ended, whether it ran in this process or in others."""

    @property
    def exit_code(self) -> int: ...

    @property
    def stopped_by(self) -> int | None: ...

    @property
    def message(self) -> str: ...


def report(run: Callable[[], Result]) -> int:
    """Run a job, tell the user how it ended, and return the exit code."""
    try:
        result = run()
    except (ConfigError, JobError) as error:
        return refusal(error)
    except Exception:  # the traceback ends with the job's notes: what is safe, and how to go on
        traceback.print_exc()
        return 1
    if result.stopped_by is not None:
        print(result.message, file=sys.stderr)
    else:
        print(result.message)
    return result.exit_code


def run_configured(config: JobConfig) -> Result:
    """Run the job of a configuration, and say before the first import that it begins."""
    if config.launcher.kind != "none":
        from batchgen.launchers.launch import launch

        return launch(config)
    from batchgen.util.versions import version

    print(
        f"batchgen {version('batchgen')}: reading model {config.model.path} and data set "
        f"{config.dataset.path or config.dataset.kind} …",
        file=sys.stderr,
        flush=True,
    )
    # Each import takes seconds: torch and transformers come with the first one, datasets and
    # pyarrow with the second, and a mistake in the model is found before.
    from batchgen.jobs.job_parts import job_parts

    parts = job_parts(config)
    from batchgen.jobs.run_job import run_job

    return run_job(config, parts)


def refusal(error: ConfigError | JobError) -> int:
    """Print why there is no job, and return the exit code."""
    notes = list(error.__notes__) if hasattr(error, "__notes__") else []
    print(f"batchgen: {error}", *notes, sep="\n", file=sys.stderr)
    return 2 if isinstance(error, ConfigError) else 1


def be_quiet() -> None:
    """Silence the libraries' log lines and warnings, unless the user has set their variables."""
    for name, value in {
        "TRANSFORMERS_VERBOSITY": "error",
        "DATASETS_VERBOSITY": "error",
        "HF_HUB_VERBOSITY": "error",
        "TOKENIZERS_PARALLELISM": "false",
    }.items():
        os.environ.setdefault(name, value)
    warnings.filterwarnings("ignore", module=r"transformers|datasets|huggingface_hub|torch")
