"""The command `batchgen`: a Hydra application that runs one job, or several with `--multirun`.

Exit codes: 0 if all rows have an answer, 1 if the job failed, 2 if there is a mistake in the
configuration, 3 if the job is complete but some rows have an error instead of an answer, and 128
plus the signal's number if a signal stopped it.
"""

import os
import sys
import traceback
import warnings
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

import hydra
from hydra.core.global_hydra import GlobalHydra
from hydra.core.hydra_config import HydraConfig
from hydra.types import RunMode
from omegaconf import DictConfig

from batchgen.command.verbs import VERBS, run_verb
from batchgen.cpu_threads import share_cores
from batchgen.errors import ConfigError, JobError
from batchgen.overrides import unreadable_override

if TYPE_CHECKING:
    from batchgen.job import JobResult


class SweepJobFailed(Exception):
    """Raised by a job of a sweep that failed in a process of its own, where it has printed why."""


def main() -> None:
    """The console script: runs what the command line says and ends the process."""
    sys.exit(run_command(sys.argv[1:]))


def run_command(arguments: Sequence[str]) -> int:
    """Run what the command line says and return the exit code.

    Args:
        arguments: of the command line, without the program's name.
    """
    share_cores()
    _be_quiet()
    if arguments and arguments[0] in VERBS:
        return run_verb(arguments[0], arguments[1:])
    if mistake := unreadable_override(arguments):
        print(f"batchgen: {mistake}", file=sys.stderr)
        return 2
    codes: list[int] = []
    process = os.getpid()

    @hydra.main(config_path="pkg://batchgen.conf", config_name="config", version_base="1.3")
    def task(cfg: DictConfig) -> None:
        code = report(lambda: _run(cfg))
        codes.append(code)
        # A launcher that runs jobs in other processes hands back their exceptions and not their
        # exit codes.
        if code and os.getpid() != process:
            raise SweepJobFailed(f"exit code {code}")
        # A signal ends a whole sweep; after any other failure its next job runs.
        if code > 128 or (code and HydraConfig.get().mode != RunMode.MULTIRUN):
            sys.exit(code)

    sys.argv[1:] = arguments
    GlobalHydra.instance().clear()
    try:
        task()
    except SystemExit as exit:
        if exit.code and not codes:  # Hydra has refused the command line and said why
            return 2
        return exit.code if isinstance(exit.code, int) else 0
    except KeyboardInterrupt:
        return 130
    return _worst(codes)


def report(run: Callable[[], "JobResult"]) -> int:
    """Run a job, tell the user how it ended, and return the exit code."""
    try:
        result = run()
    except (ConfigError, JobError) as error:
        print(f"batchgen: {error}", *_notes(error), sep="\n", file=sys.stderr)
        return 2 if isinstance(error, ConfigError) else 1
    except Exception:  # the traceback ends with the job's notes: what is safe, and how to go on
        traceback.print_exc()
        return 1
    if result.stopped_by is not None:
        print(result.message, file=sys.stderr)
    else:
        print(result.message)
    return result.exit_code


def _run(cfg: DictConfig) -> "JobResult":
    from batchgen.config import load_config

    config = load_config(cfg)
    # Each import takes seconds, and help or a mistake in the configuration needs neither: torch and
    # transformers come with the first one, datasets and pyarrow with the second.
    from batchgen.build import job_parts

    parts = job_parts(config)
    from batchgen.job import run_job

    return run_job(config, parts)


def _notes(error: BaseException) -> list[str]:
    return list(error.__notes__) if hasattr(error, "__notes__") else []


def _worst(codes: list[int]) -> int:
    """The exit code of a sweep: the gravest of its jobs' codes.

    A job that failed (1) is graver than one that was refused (2), and that than error rows (3).
    """
    return next((code for code in (1, 2, 3) if code in codes), 0)


def _be_quiet() -> None:
    """Silence the libraries' log lines and warnings, unless the user has set their variables."""
    for name, value in {
        "TRANSFORMERS_VERBOSITY": "error",
        "DATASETS_VERBOSITY": "error",
        "HF_HUB_VERBOSITY": "error",
        "TOKENIZERS_PARALLELISM": "false",
    }.items():
        os.environ.setdefault(name, value)
    warnings.filterwarnings("ignore", module=r"transformers|datasets|huggingface_hub|torch")


if __name__ == "__main__":
    main()
