"""The command `batchgen`: a Hydra app that runs one job, or with `--multirun` several.

Exit codes: 0 all rows have an answer; 1 the job failed; 2 a mistake in the configuration;
3 complete, but some rows have an error; 128 + signal if it was stopped.
"""

import os
import sys
import traceback
import warnings
from collections.abc import Callable

import hydra
from hydra.core.hydra_config import HydraConfig
from hydra.types import RunMode
from omegaconf import DictConfig

from batchgen.config import load_config
from batchgen.errors import ConfigError, JobError
from batchgen.job import JobResult, run_job


class SweepJobFailed(Exception):
    """A job of a sweep ran in another process and failed; it has said why."""


def main() -> None:
    """Entry point of the console script; exits with the code above."""
    _be_quiet()
    codes: list[int] = []
    process = os.getpid()

    @hydra.main(config_path="pkg://batchgen.conf", config_name="config", version_base="1.3")
    def task(cfg: DictConfig) -> None:
        code = report(lambda: _run(cfg))
        codes.append(code)
        # A launcher that runs jobs in other processes hands back exceptions, but no exit codes.
        if code and os.getpid() != process:
            raise SweepJobFailed(f"exit code {code}")
        if code > 128 or (code and HydraConfig.get().mode != RunMode.MULTIRUN):
            sys.exit(code)

    try:
        task()
    except SystemExit as exit:
        if exit.code and not codes:  # Hydra has refused the command line
            sys.exit(2)
        raise
    except KeyboardInterrupt:
        sys.exit(130)
    sys.exit(_worst(codes))


def report(run: Callable[[], JobResult]) -> int:
    """Run a job and tell the user how it ended; returns the exit code."""
    try:
        result = run()
    except (ConfigError, JobError) as error:
        print(f"batchgen: {error}", *_notes(error), sep="\n", file=sys.stderr)
        return 2 if isinstance(error, ConfigError) else 1
    except Exception:  # the last place to say what is safe and how to go on
        traceback.print_exc()
        return 1
    if result.stopped_by is not None:
        print(result.message, file=sys.stderr)
    else:
        print(result.message)
    return result.exit_code


def _run(cfg: DictConfig) -> JobResult:
    from batchgen.build import job_parts  # loads transformers, which --help does not need

    config = load_config(cfg)
    return run_job(config, job_parts(config))


def _notes(error: BaseException) -> list[str]:
    return list(error.__notes__) if hasattr(error, "__notes__") else []


def _worst(codes: list[int]) -> int:
    """Of a sweep's exit codes the gravest: failed, then refused, then error rows."""
    return next((code for code in (1, 2, 3) if code in codes), 0)


def _be_quiet() -> None:
    """No chatter of libraries between the user and the progress bar, unless asked for."""
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
