"""Composes the job or the pipeline that a command line describes, for `batchgen/__main__.py` and
for sweeps."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from batchgen.cli.options import Options, choice_folders
from batchgen.cli.verb_table import VERBS
from batchgen.config.compose.compose_config import Composed, compose_groups
from batchgen.config.compose.job_file import read_job_file
from batchgen.config.compose.load_config import load_config, resolved
from batchgen.config.compose.trust import TYPED, Trust
from batchgen.config.groups.job_config import JobConfig
from batchgen.pipelines.run.pipeline import Pipeline, compose_pipeline
from batchgen.pipelines.run.pipeline_file import read_pipeline, ready_pipeline
from batchgen.pipelines.run.pipeline_values import PIPELINE, STEPS
from batchgen.util.errors import ConfigError
from batchgen.util.paths import short_user_path
from batchgen.util.text.plain_yaml import yaml_text


def composed(options: Options) -> JobConfig:
    """Return the configuration of a command line's job. Raises ConfigError for a mistake in the job
    file or in an argument."""
    groups = compose_options(options, options.overrides).groups
    return load_config(groups, trust_of(options, options.overrides))


def compose_options(options: Options, overrides: Sequence[str]) -> Composed:
    """Return the choices and keys of a job, with unchecked values.

    Args:
        overrides: the arguments of the job. In a sweep they differ from `options.overrides`.
    """
    values, locations = job_file(options)
    return compose_groups(values, overrides, folders=choice_folders(options), locations=locations)


def composed_pipeline(options: Options) -> Pipeline | None:
    """Return the pipeline of a command line; None if the command line describes a single job."""
    overrides = list(options.overrides)
    named = [override for override in overrides if override.partition("=")[0] == PIPELINE]
    folders = choice_folders(options)
    if named:
        if options.job_file is not None:
            raise ConfigError(f"{named[-1]}: {options.job_file} says what is run: leave one out")
        values, locations = ready_pipeline(named[-1].partition("=")[2], folders)
        overrides = [override for override in overrides if override not in named]
    else:
        values, locations = job_file(options)
        if STEPS not in values:
            return None
    trust = trust_of(options, overrides)
    return compose_pipeline(read_pipeline(values, locations, overrides, VERBS), trust, folders)


def show_config(options: Options) -> int:
    """Print the job or the pipeline as a file (`--cfg job`); returns the exit code."""
    if options.values["--cfg"][-1] != "job":
        raise ConfigError(f"--cfg {options.values['--cfg'][-1]}: write --cfg job, hydra or all")
    package = options.values.get("--package", [None])[-1]
    if (pipeline := composed_pipeline(options)) is not None:
        if package is not None:
            raise ConfigError("--package shows a group of one job, and this is a pipeline")
        print(pipeline.text(), end="")
        return 0
    groups = compose_options(options, options.overrides).groups
    if "--resolve" in options.flags:
        groups = resolved(load_config(groups, TYPED))  # no code that it names runs
    if package is not None:
        if package not in groups:
            raise ConfigError(f"--package {package}: choose among {', '.join(groups)}")
        groups = {package: groups[package]}
    print(yaml_text(groups), end="")
    return 0


def trust_of(options: Options, overrides: Sequence[str]) -> Trust:
    """Return which parts of a job may name code to run (see `Trust`). Raises ConfigError if
    `--trust` names a file or folder that is not read."""
    read = [] if options.job_file is None else [options.job_file]
    for option in ("--config-dir", "--experimental-rerun"):
        read += [short_user_path(name, option) for name in options.values.get(option, ())]
    return Trust.of(read, options.values.get("--trust", ()), overrides)


def job_file(options: Options) -> tuple[dict[str, Any], dict[str, str]]:
    """Read the job file of a command line. Returns its values, and the place of each key in the
    file; both are empty without a job file."""
    path = options.job_file
    if path is None:
        return {}, {}
    if path.is_dir():
        if (path / "config.yaml").is_file():
            raise ConfigError(f"{path} is a folder: its job file is {path / 'config.yaml'}")
        raise ConfigError(
            f"{path} is a folder and not a job file: `batchgen init job.yaml` writes one"
        )
    if not path.exists():
        raise ConfigError(f"there is no job file {path}: `batchgen init {path}` writes one")
    return read_job_file(path)
