"""Runs sweeps, and command lines with Hydra's launchers or sweepers, as a Hydra application.
`run_hydra` is the entry point.

`batchgen --multirun sampling.seed=1,2` runs jobs one after another in this process. `batchgen
--multirun hydra/launcher=submitit_slurm sampling.seed=1,2` submits the jobs to Slurm. Jobs are
composed as without a launcher. Hydra decides where and in which order they run.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from importlib import metadata
from pathlib import Path
from typing import Any, cast

import hydra
from hydra.core.global_hydra import GlobalHydra
from hydra.core.hydra_config import HydraConfig
from hydra.errors import CompactHydraException, HydraException, MissingConfigException
from hydra.types import RunMode
from omegaconf import DictConfig, OmegaConf
from omegaconf.errors import OmegaConfBaseException

from batchgen.api.python.configured_job import JobOutcome, run_configured
from batchgen.cli.cpu_threads import share_cores
from batchgen.cli.hydra_arguments import (
    HydraArguments,
    hydra_argument,
    hydra_arguments,
    hydra_value,
    parent_of_jobs,
)
from batchgen.cli.job_outcome import be_quiet, report
from batchgen.cli.options import Options, choice_folders
from batchgen.cli.run_options import trust_of
from batchgen.cli.sweep import (
    SweepJob,
    dated_folder,
    job_folder_name,
    record,
    sweep_table,
    swept_values,
    worst,
)
from batchgen.cli.sweep_end import show_arms
from batchgen.config.compose.choice_files import search_path
from batchgen.config.compose.load_config import load_config
from batchgen.config.compose.trust import Trust
from batchgen.config.compose.value_references import RESOLVERS_OF_HYDRA
from batchgen.inputs.model.kept_weights import KeptWeights
from batchgen.storage.stores.open_storage import job_metrics
from batchgen.util.errors import ConfigError
from batchgen.util.paths import is_url

_PLUGINS = {
    "joblib": "hydra-joblib-launcher",
    "ray": "hydra-ray-launcher",
    "ray_aws": "hydra-ray-launcher",
    "rq": "hydra-rq-launcher",
    "submitit_local": "hydra-submitit-launcher",
    "submitit_slurm": "hydra-submitit-launcher",
    "ax": "hydra-ax-sweeper",
    "nevergrad": "hydra-nevergrad-sweeper",
    "optuna": "hydra-optuna-sweeper",
    "colorlog": "hydra-colorlog",
}
"""Choices of Hydra's launchers, sweepers and loggers, and the package that each is part of."""


_QUIET = ("hydra/hydra_logging=none", "hydra/job_logging=none")
"""Switches Hydra's logging off, because a sweep without Hydra's options prints which job it
runs."""


class SweepJobFailed(CompactHydraException):
    """A job failed in another process, which has printed the reason. Launchers pass on the
    exceptions of jobs, but not their exit codes, so the exception has the code."""

    def __init__(self, code: int) -> None:
        super().__init__(code)
        self.code = code

    def __str__(self) -> str:
        return f"batchgen: a job in another process ended with exit code {self.code}"


@dataclass
class HydraTask:
    """The function that Hydra calls for each job, in this process or in another one.

    Attributes:
        arguments: the command line in Hydra's grammar.
        parent_setting: the setting that names the parent of the jobs' folders: "sweep.dir" or
            "run.dir" of Hydra, "output.dir", or "" if `output.dir` is a job's own folder.
        trust: which code named in configuration files may run.
        process: the id of the process in which the command was typed.
        jobs: the jobs that have run in that process.
        weights: the loaded weights, which jobs with the same model share.
    """

    arguments: HydraArguments
    parent_setting: str
    trust: Trust
    process: int = field(default_factory=os.getpid)
    jobs: list[SweepJob] = field(default_factory=list)
    weights: KeptWeights = field(default_factory=KeptWeights)

    def __call__(self, cfg: DictConfig) -> float | None:
        """Run a job, and return its tokens per second, which a sweeper may optimise; None if it has
        none.

        Raises:
            SweepJobFailed: the job failed in another process than the command's.
            SystemExit: a signal ends the whole sweep.
        """
        elsewhere = os.getpid() != self.process
        if elsewhere:  # a launcher's process has not run `run_command`
            share_cores()
            be_quiet()
        sweep = HydraConfig.get().mode == RunMode.MULTIRUN
        # "." stands for the parent folder itself.
        job = SweepJob((self._name() or ".") if sweep else "", config=None)
        if sweep:
            of_total = f" of {len(self.arguments.names)}" if self.arguments.names else ""
            print(f"── job {HydraConfig.get().job.num + 1}{of_total}: {job.name}", flush=True)
        job.code = report(lambda: self._run(cfg, job))
        if elsewhere and job.code:
            raise SweepJobFailed(job.code)
        self.jobs.append(job)
        if job.code > 128:
            sys.exit(job.code)
        return _speed(job)

    def _run(self, cfg: DictConfig, job: SweepJob) -> JobOutcome:
        """Set the job's output folder, complete its configuration, and run it."""
        hydra_config = HydraConfig.get()
        if self.parent_setting == "run.dir":
            cfg.output.dir = hydra_config.run.dir
        elif self.parent_setting:
            subdir = hydra_config.sweep.subdir
            parent = cfg.output.dir
            if self.parent_setting == "sweep.dir":
                parent = hydra_config.sweep.dir
            name = job.name if subdir == "." else subdir  # conf/config.yaml sets `.`
            cfg.output.dir = f"{parent}/{name}" if is_url(parent) else str(Path(parent) / name)
        groups = cast(dict[str, Any], OmegaConf.to_container(cfg))
        job.config = load_config(groups, self.trust, resolvers=RESOLVERS_OF_HYDRA)
        return run_configured(job.config, self.weights)

    def _name(self) -> str:
        """Return the name of a job's folder in a sweep, made of the settings in which the job
        differs from others."""
        fixed, typed = self.arguments.fixed_keys(), HydraConfig.get().overrides.task
        varied = tuple(text for text in typed if text.partition("=")[0] not in fixed)
        if varied in self.arguments.names:
            return self.arguments.names[varied]
        return job_folder_name(
            [self.arguments.typed.get(text, text).lstrip("+") for text in varied], taken=()
        )


def run_hydra(options: Options) -> int:
    """Run the job or the sweep of a command line with Hydra's options, and return the exit code."""
    trust = trust_of(options, options.overrides)
    _check_trusted(options, trust)
    _check_plugins(options.hydra)
    _check_choices(options)
    mode = hydra_value(options.hydra, "hydra.mode")
    sweep = "--multirun" in options.flags or (mode or "").upper() == "MULTIRUN"
    if not options.hydra:
        for argument in options.overrides:
            swept_values(argument)  # Hydra's basic sweeper needs finite lists
    arguments = hydra_arguments(options, sweep)
    task = HydraTask(arguments, parent_of_jobs(arguments, options, sweep=sweep), trust)
    words = [*arguments.fixed, *arguments.swept, *(options.hydra or _QUIET)]
    # The parent of the jobs' folders, if it is known in advance.
    parent = hydra_value(options.hydra, "hydra.sweep.dir")
    if sweep and parent is None:
        if task.parent_setting == "sweep.dir":
            parent = str(dated_folder(options))
            record(Path(parent), options)
        elif task.parent_setting:
            parent = arguments.output_dir
        if parent is not None:
            words.append(hydra_argument("hydra.sweep.dir", parent))
    code = _call(task, [*_flags(options), *words])
    names = list(arguments.names.values())
    if not task.jobs:
        if sweep and parent is not None and not code:  # a launcher ran the jobs in other processes
            show_arms([(name, f"{parent}/{name}") for name in names if name])
        return code
    if sweep:
        others = names[len(task.jobs) :]  # they have not run, because a signal ended the sweep
        print(sweep_table([*task.jobs, *(SweepJob(name or ".", None) for name in others)]))
        ran = [(job.name, job.config.output.dir) for job in task.jobs if job.config is not None]
        show_arms(ran)
    return worst([code, *(job.code for job in task.jobs if job.code is not None)])


def _call(task: HydraTask, arguments: Sequence[str]) -> int:
    """Let Hydra read the arguments and launch the jobs; returns the exit code."""
    main = hydra.main(config_path="pkg://batchgen.conf", config_name="config", version_base="1.3")
    GlobalHydra.instance().clear()
    try:
        with _command_line(arguments):
            main(task)()
    except SystemExit as exit:
        error = exit.__context__
        if isinstance(error, SweepJobFailed):
            return error.code
        if task.jobs or not exit.code:
            return exit.code if isinstance(exit.code, int) else int(bool(exit.code))
        return 2  # Hydra has refused the command line and said why
    return 0


@contextmanager
def _command_line(arguments: Sequence[str]) -> Iterator[None]:
    """Replace `sys.argv` for a while, because Hydra reads its arguments only there."""
    before = sys.argv
    sys.argv = [before[0], *arguments]
    try:
        yield
    finally:
        sys.argv = before


def _flags(options: Options) -> list[str]:
    """Return the command line's options as Hydra writes them."""
    flags = sorted(options.flags & {"--multirun", "--hydra-help", "--resolve"})
    for flag in ("--cfg", "--package", "--info", "--experimental-rerun"):
        flags += [f"{flag}={value}" for value in options.values.get(flag, ())[-1:]]
    return [*flags, *search_path(choice_folders(options))]


def _check_plugins(arguments: Sequence[str]) -> None:
    """Raise ConfigError if a chosen launcher, sweeper or logger is not installed."""
    for argument in arguments:
        group, _, choice = argument.lstrip("+").partition("=")
        if "/" in group and (package := _PLUGINS.get(choice)) is not None:
            try:
                metadata.version(package)
            except metadata.PackageNotFoundError:
                raise ConfigError(
                    f"{argument}: this plug-in of Hydra is not installed: pip install {package}"
                ) from None


def _check_trusted(options: Options, trust: Trust) -> None:
    """Raise ConfigError for untrusted configuration files, because Hydra runs the launchers and
    callbacks that they name."""
    job_file = options.job_file
    if files := [str(source) for source in trust.sources if source != job_file]:
        raise ConfigError(
            f"{' and '.join(files)}: Hydra itself runs code that such files name: if you trust "
            f"whoever wrote them, add {' '.join(f'--trust {file}' for file in files)}"
        )


def _check_choices(options: Options) -> None:
    """Raise ConfigError for choices and keys that Hydra does not have, before the sweep's folder is
    made."""
    if (hydra_value(options.hydra, "hydra.job.chdir") or "").lower() == "true":
        raise ConfigError(
            "hydra.job.chdir=true: batchgen stays in the folder in which it was started, so that "
            "relative paths keep their meaning: leave it out; output.dir and hydra.run.dir say "
            "where a job goes"
        )
    overrides = [*options.hydra, *search_path(choice_folders(options))]
    GlobalHydra.instance().clear()
    try:
        with hydra.initialize_config_module("batchgen.conf", version_base="1.3"):
            hydra.compose("config", overrides=overrides, return_hydra_config=True)
    except MissingConfigException as error:
        known = f": choose among {', '.join(error.options)}" if error.options else ""
        raise ConfigError(f"Hydra has no {error.missing_cfg_file}{known}") from None
    except (HydraException, OmegaConfBaseException) as error:
        raise ConfigError(f"{' '.join(options.hydra)}: {' '.join(str(error).split())}") from None


def _speed(job: SweepJob) -> float | None:
    """Return a complete job's tokens per second; None for other jobs."""
    if job.config is None or job.code not in (0, 3):
        return None
    metrics = job_metrics(job.config.output.dir)
    return None if metrics is None else float(metrics["tokens_per_s"])
