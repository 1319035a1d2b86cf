"""The command `batchgen`: runs one job, several jobs (`--multirun`), a pipeline, or a verb such as
`batchgen report`.

Exit codes: 0 if all rows have an answer, 1 if the job failed, 2 if there is a mistake in the
configuration, 3 if the job is complete but some rows have an error instead of an answer, 4 if its
budget is spent, and 128 plus the signal's number if a signal stopped it. A sweep returns the most
serious exit code of its jobs. A signal ends the whole sweep.

Torch, transformers and the data libraries take seconds to load. So most modules are imported inside
functions, once it is clear that they are needed.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence
from typing import TYPE_CHECKING

from batchgen.api.python.configured_job import run_configured
from batchgen.cli.cpu_threads import share_cores
from batchgen.cli.job_outcome import be_quiet, refusal, report
from batchgen.cli.options import Options, asks_hydra, choice_folders, parse_options, warn_of_repeats
from batchgen.cli.verb_table import VERBS, run_verb
from batchgen.util.errors import ConfigError, JobError
from batchgen.util.text.terminal import guard_terminal

if TYPE_CHECKING:
    from batchgen.pipelines.run.pipeline import Pipeline


def main() -> None:
    """The console script: run the command line, and end the process with its exit code."""
    code = run_command(sys.argv[1:])
    ranks = sys.modules.get("batchgen.engine.parallel.rank_group")  # only if a job has imported it
    if ranks is not None:
        ranks.end_process(code)
    sys.exit(code)


def run_command(arguments: Sequence[str]) -> int:
    """Run the command line, and return the exit code.

    Args:
        arguments: the command line without the program's name.
    """
    share_cores()
    be_quiet()
    guard_terminal()
    try:
        if arguments and arguments[0] in VERBS:
            return run_verb(arguments[0], arguments[1:])
        return _run_options(parse_options(arguments))
    except (ConfigError, JobError) as error:
        return refusal(error)
    except KeyboardInterrupt:
        return 130
    except BrokenPipeError:  # `batchgen … | head` has read enough
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 141


def _run_options(options: Options) -> int:
    """Run a command line without a verb: print what an option asks for, such as `--help`, or run a
    pipeline, a sweep or one job. Returns the exit code."""
    if "--version" in options.flags:
        from batchgen.util.versions import versions

        print(versions())
        return 0
    if "--help" in options.flags:
        from batchgen.cli.help import help_text

        print(help_text(options.overrides, choice_folders(options)))
        return 0
    if "--completion" in options.flags:
        from batchgen.cli.completion import completion_script

        print(completion_script(options.values["--completion"][-1]))
        return 0
    if asks_hydra(options):
        from batchgen.cli.hydra_app import run_hydra

        return run_hydra(options)
    from batchgen.cli.run_options import composed, composed_pipeline, show_config

    warn_of_repeats(options)
    if "--cfg" in options.flags:
        return show_config(options)
    for flag in ("--package", "--resolve"):
        if flag in options.flags:
            raise ConfigError(f"{flag} says how --cfg job prints a job: add --cfg job")
    if (pipeline := composed_pipeline(options)) is not None:
        return _run_pipeline(pipeline, options)
    if {"--multirun", "--dry-run"} <= options.flags:
        from batchgen.cli.sweep_list import list_jobs

        return list_jobs(options)
    if "--multirun" in options.flags:
        from batchgen.cli.hydra_app import run_hydra

        return run_hydra(options)
    config = composed(options)
    if "--dry-run" in options.flags:
        from batchgen.jobs.planning.dry_run import show

        return show(config)
    return report(lambda: run_configured(config))


def _run_pipeline(pipeline: Pipeline, options: Options) -> int:
    """Run a pipeline, or list its steps with `--dry-run`. Returns the exit code."""
    if "--multirun" in options.flags:
        raise ConfigError("--multirun runs jobs: give a pipeline one value for each key")
    pipeline.check_early()
    if "--dry-run" in options.flags:
        from batchgen.pipelines.run.planned_steps import show_steps

        return show_steps(pipeline)
    from batchgen.pipelines.run.run_pipeline import run_pipeline  # it loads torch

    return report(lambda: run_pipeline(pipeline))


if __name__ == "__main__":
    main()
