"""The command `batchgen`: it runs one job, or several with `--multirun`, or a verb.

Exit codes: 0 if all rows have an answer, 1 if the job failed, 2 if there is a mistake in the
configuration, 3 if the job is complete but some rows have an error instead of an answer, and 128
plus the signal's number if a signal stopped it. A sweep ends with the gravest code of its jobs; a
signal ends the whole sweep.

Torch, transformers and the libraries of the data take seconds to load. So nothing is imported here
before it is known to be needed.
"""

import os
import sys
import traceback
import warnings
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

from batchgen.command.options import Options, parse_options
from batchgen.command.verbs import VERBS, run_verb
from batchgen.cpu_threads import share_cores
from batchgen.errors import ConfigError, JobError

if TYPE_CHECKING:
    from batchgen.config import JobConfig
    from batchgen.job import JobResult


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
    try:
        if arguments and arguments[0] in VERBS:
            return run_verb(arguments[0], arguments[1:])
        return _run_options(parse_options(arguments))
    except (ConfigError, JobError) as error:
        return _refusal(error)
    except KeyboardInterrupt:
        return 130
    except BrokenPipeError:  # `batchgen … | head` has read enough
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 141


def report(run: Callable[[], "JobResult"]) -> int:
    """Run a job, tell the user how it ended, and return the exit code."""
    try:
        result = run()
    except (ConfigError, JobError) as error:
        return _refusal(error)
    except Exception:  # the traceback ends with the job's notes: what is safe, and how to go on
        traceback.print_exc()
        return 1
    if result.stopped_by is not None:
        print(result.message, file=sys.stderr)
    else:
        print(result.message)
    return result.exit_code


def _run_options(options: Options) -> int:
    if "--version" in options.flags:
        from batchgen.command.version import versions

        print(versions())
        return 0
    if "--help" in options.flags:
        from batchgen.command.help import help_text

        print(help_text(options.overrides))
        return 0
    if "--completion" in options.flags:
        from batchgen.command.completion import completion_script

        print(completion_script(options.values["--completion"][-1]))
        return 0
    from batchgen.command.run import composed, show_config

    if "--cfg" in options.flags:
        return show_config(options)
    if {"--multirun", "--dry-run"} <= options.flags:
        raise ConfigError("--dry-run shows one job: leave out --multirun and give one value each")
    if "--multirun" in options.flags:
        from batchgen.command.sweep import run_sweep

        return run_sweep(options, lambda config: report(lambda: _run_job(config)))
    config = composed(options)
    if "--dry-run" in options.flags:
        from batchgen.command.dry_run import show

        return show(config)
    return report(lambda: _run_job(config))


def _run_job(config: "JobConfig") -> "JobResult":
    from batchgen.command.version import version

    print(
        f"batchgen {version('batchgen')}: reading model {config.model.path} and data set "
        f"{config.dataset.path or config.dataset.kind} …",
        file=sys.stderr,
        flush=True,
    )
    # Each import takes seconds: torch and transformers come with the first one, datasets and
    # pyarrow with the second, and a mistake in the model is found before.
    from batchgen.build import job_parts

    parts = job_parts(config)
    from batchgen.job import run_job

    return run_job(config, parts)


def _refusal(error: ConfigError | JobError) -> int:
    notes = list(error.__notes__) if hasattr(error, "__notes__") else []
    print(f"batchgen: {error}", *notes, sep="\n", file=sys.stderr)
    return 2 if isinstance(error, ConfigError) else 1


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
