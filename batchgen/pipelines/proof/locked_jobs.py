"""Turns a lock file into jobs that can run, in folders that the user chooses. `batchgen rebuild`
uses it.

A lock file may come from a stranger, so paths in it are read only after the user confirms them.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from batchgen.config.compose.load_config import resolved
from batchgen.config.compose.overrides import parse_override
from batchgen.config.compose.trust import Trust
from batchgen.config.groups.job_config import JobConfig
from batchgen.engine.sampling.sampling_params import BASE
from batchgen.pipelines.proof.lock_file import STEPS, LockFile
from batchgen.pipelines.run.pipeline import Pipeline, compose_pipeline
from batchgen.pipelines.run.pipeline_file import read_pipeline
from batchgen.util.errors import ConfigError
from batchgen.util.paths import is_url

_PACKAGE = "package://"
"""The prefix of paths inside installed packages, such as batchgen."""
_ENDS = ("path", "_file", "_model", "_root")
"""The endings of keys whose values are paths."""
_ADAPTERS = "model.lora"
"""The key of LoRA adapters: a path, a list of paths, or name → path."""
_TABLES = (".jsonl", ".json", ".csv", ".tsv", ".parquet", ".txt", ".gz")
"""The endings of files that a step of `rows` can read."""
_OF_CONSTRAINT = ("schema", "grammar", "tag")
"""The options of a constraint whose value is either a path or the text of a schema or grammar."""
_TEXT = ("{", "::=")
"""Strings that occur in a schema or grammar and not in a path."""


@dataclass(frozen=True)
class LockedJobs:
    """The jobs of a lock file.

    Attributes:
        pipeline: the steps of the lock as a pipeline.
        folders: step name → the folder in which the step writes.
    """

    lock: LockFile
    pipeline: Pipeline
    folders: Mapping[str, str]

    def config(self, name: str, folders: Mapping[str, str] | None = None) -> JobConfig:
        """Return the job of a step. `folders` replaces the folders of the steps."""
        config = self.pipeline.steps[name].within(self.folders if folders is None else folders)
        sampling = self.lock.steps[name].get("sampling")
        # A pipeline gives every step a random stream. The lock of single jobs may have none.
        if not isinstance(sampling, dict) or sampling.get("stream") is None:
            config = replace(config, sampling=replace(config.sampling, stream=None))
        return config


def locked_jobs(
    lock: LockFile,
    file: Path,
    overrides: Sequence[str],
    trusted: Sequence[str] = (),
    *,
    confirmed: bool = False,
) -> LockedJobs:
    """Compose the jobs of a lock file.

    Args:
        file: the path of the lock file.
        overrides: the arguments that the user typed: `output.dir`, and the paths of models and data
            for all steps (`model.path=…`) or for one (`judge.model.path=…`).
        trusted: what the user trusts, see `--trust`.
        confirmed: whether the user has confirmed the paths in the lock.

    Raises:
        ConfigError: a key is wrong, a path is not confirmed, or the file names code that is not
            batchgen's own.
    """
    values = read_pipeline({STEPS: dict(lock.steps)}, lock.locations, overrides)
    if is_url(values.out):
        raise ConfigError(
            "output.dir: a lock can only be rebuilt in a folder of this machine: name one"
        )
    typed = {parse_override(argument).key for argument in overrides if "=" in argument}
    if not confirmed:  # before composing, which reads templates and schemas
        _confirm({name: _nested(step.values) for name, step in values.steps.items()}, typed)
    pipeline = compose_pipeline(values, Trust.of([file], trusted, overrides))
    if not confirmed:
        _confirm({name: _plain(step.config) for name, step in pipeline.steps.items()}, typed)
    names = list(pipeline.steps)
    folders = {name: f"{pipeline.out.rstrip('/')}/{name}" for name in names}
    if len(names) == 1:
        folders = {names[0]: pipeline.out}
    return LockedJobs(lock, pipeline, folders)


def _confirm(steps: Mapping[str, Mapping[str, Any]], typed: set[str]) -> None:
    """Refuse paths that the lock file names and the user has neither typed nor confirmed.

    Raises:
        ConfigError: lists those paths.
    """
    unconfirmed = [
        (f"{name}.{key}", path)
        for name, values in steps.items()
        for key, path in places_read(values)
        if not {key, f"{name}.{key}"} & typed
        # A typed value of the adapters' key replaces all named adapters.
        and not (key.startswith(f"{_ADAPTERS}.") and {_ADAPTERS, f"{name}.{_ADAPTERS}"} & typed)
    ]
    if unconfirmed:
        listed = "".join(f"\n  {key}={path}" for key, path in unconfirmed)
        raise ConfigError(
            f"the lock names models and data that would be read:{listed}\nname your own with "
            "KEY=PATH, or add --yes to read these"
        )


def _nested(values: Mapping[str, Any]) -> dict[str, Any]:
    """Convert the values of a step to nested groups. Keys may be full names, such as `model.path`,
    and a group may be the name of a choice."""
    nested: dict[str, Any] = {}
    for key, value in values.items():
        group, _, name = key.partition(".")
        if isinstance(value, list) and not name:
            nested[group] = value
        else:
            below = value if isinstance(value, dict) and not name else {name or "choice": value}
            nested[group] = {**nested.get(group, {}), **below}
    return nested


def _plain(config: JobConfig) -> dict[str, Any]:
    """Return the composed groups of a job that can hold paths of the lock."""
    groups = resolved(config)
    if config.dataset.kind == "job":
        del groups["dataset"]["path"]  # folders of other steps, which the user chose
    return {name: groups[name] for name in ("model", "dataset", "prompt", "strategy")}


def places_read(values: Mapping[str, Any]) -> Iterator[tuple[str, str]]:
    """Yield (key, path) for each model, data set and file that a job reads, except those in
    installed packages.

    Args:
        values: the job's configuration by group.
    """
    for group, group_values in values.items():
        if group == "rows":
            for index, step in enumerate(group_values if isinstance(group_values, list) else ()):
                yield from _places(step, f"{group}[{index}]", _is_place_of_step)
        elif group == "constraint":
            yield from _places(group_values, group, _is_place_of_constraint)
        elif group not in ("post", "output"):
            yield from _places(group_values, group, _is_place)


def _places(
    value: Any, key: str, is_place: Callable[[str, str], bool]
) -> Iterator[tuple[str, str]]:
    """Yield (key, path) for each path in a value, at any depth."""
    if isinstance(value, dict):
        for name, item in value.items():
            yield from _places(item, f"{key}.{name}", is_place)
    elif isinstance(value, list | tuple):
        for item in value:
            yield from _places(item, key, is_place)
    elif isinstance(value, str) and not value.startswith(_PACKAGE) and is_place(key, value):
        yield key, value


def _is_place(key: str, value: str) -> bool:
    is_adapter = key == _ADAPTERS or key.startswith(f"{_ADAPTERS}.")
    return value != BASE if is_adapter else key.endswith(_ENDS)


def _is_place_of_step(key: str, value: str) -> bool:
    """Whether an option of a step of `rows` is a path. A step may read a file from an option of any
    name."""
    return key.endswith(_ENDS) or "/" in value or value.endswith(_TABLES)


def _is_place_of_constraint(key: str, value: str) -> bool:
    """Whether an option of a constraint is a path, and not the schema or grammar itself."""
    named = key.rpartition(".")[2] in _OF_CONSTRAINT
    return named and not any(text in value for text in _TEXT)
