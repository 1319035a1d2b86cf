"""A pipeline: jobs that read each other's rows, in topological order.

`pipeline_file` reads a pipeline file; `compose_pipeline` turns the result into a `Pipeline`.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from batchgen.config.compose.compose_config import compose_groups
from batchgen.config.compose.load_config import escaped_text, load_config, resolved
from batchgen.config.compose.trust import Trust
from batchgen.config.groups.convert_value import convert
from batchgen.config.groups.job_config import JobConfig
from batchgen.jobs.resolve.early_checks import check_early
from batchgen.pipelines.run.judge_panel import check_panel
from batchgen.pipelines.run.pipeline_values import (
    AFTER,
    COMPLETE,
    EXPORT,
    FROM,
    MOST_ERRORS,
    PUSH,
    STEPS,
    PipelineValues,
    StepValues,
)
from batchgen.pipelines.run.written_sets import Export, Push, read_exports, read_pushes
from batchgen.util.errors import ConfigError
from batchgen.util.paths import user_folder
from batchgen.util.text.plain_yaml import yaml_text

_MOST_ERRORS = 0.05
_PATH = "path"


@dataclass(frozen=True)
class PipelineStep:
    """A step of a pipeline.

    Attributes:
        config: the job. The folders of other steps are OUT/NAME in it.
        parents: the steps whose answers are the rows of this step.
        tables: index of a step of `rows` → the pipeline step whose table it reads.
        waits: whether the step begins only when its parents are complete (`after: complete`).
    """

    name: str
    config: JobConfig
    parents: tuple[str, ...] = ()
    tables: Mapping[int, str] = field(default_factory=dict)
    waits: bool = False

    @property
    def reads(self) -> list[str]:
        """The steps that this step reads, as rows or as tables."""
        return list(dict.fromkeys([*self.parents, *self.tables.values()]))

    def within(self, folders: Mapping[str, str]) -> JobConfig:
        """Return the job with actual folders: step name → folder, of this step and the steps that
        it reads."""
        config = self.config
        data = config.dataset
        if self.parents:
            paths = tuple(folders[name] for name in self.parents)
            data = replace(data, path=paths[0] if len(paths) == 1 else paths)
        rows = [
            replace(step, options={**step.options, _PATH: folders[self.tables[index]]})
            if index in self.tables
            else step
            for index, step in enumerate(config.rows)
        ]
        output = replace(config.output, dir=folders[self.name])
        return replace(config, dataset=data, rows=tuple(rows), output=output)

    def values(self) -> dict[str, Any]:
        """Return the step in the form of a pipeline file, with all its keys."""
        groups = resolved(self.config)
        del groups["output"]["dir"]
        groups["workers"]["name"] = None  # it names only this process
        if self.parents:
            del groups["dataset"][_PATH]
            groups = {
                FROM: self.parents[0] if len(self.parents) == 1 else [*self.parents],
                **groups,
            }
        if self.waits:
            groups[AFTER] = COMPLETE
        for index, name in self.tables.items():
            options = groups["rows"][index]
            short = next(key for key in options if key != "_target_")
            if isinstance(options.get(short), dict):  # {Join: {…}}, a step by its short name
                options = options[short]
            del options[_PATH]
            options[FROM] = name
        return groups


@dataclass(frozen=True)
class Pipeline:
    """The steps in topological order, and the exports and pushes that follow them.

    Attributes:
        out: the folder of the pipeline, a path or URL.
        most_errors: the largest allowed share of errors in a step's first shard.
    """

    out: str
    steps: Mapping[str, PipelineStep]
    exports: Sequence[Export] = ()
    pushes: Sequence[Push] = ()
    most_errors: float = _MOST_ERRORS

    def check_early(self) -> None:
        """Detect the common mistakes of the steps before torch is loaded; see `check_early`."""
        for name, step in self.steps.items():
            try:
                check_early(step.config, folder=False)
            except ConfigError as error:
                raise ConfigError(f"step {name}: {error}") from None

    def text(self) -> str:
        """Return the pipeline as the text of a pipeline file, with all keys."""
        values: dict[str, Any] = {"output": {"dir": self.out}}
        if self.most_errors != _MOST_ERRORS:
            values[MOST_ERRORS] = self.most_errors
        values[STEPS] = {name: step.values() for name, step in self.steps.items()}
        values |= {EXPORT: [one.values() for one in self.exports]} if self.exports else {}
        values |= {PUSH: [one.values() for one in self.pushes]} if self.pushes else {}
        return yaml_text(escaped_text(values))


def compose_pipeline(
    pipeline: PipelineValues, trust: Trust, folders: Sequence[Path] = ()
) -> Pipeline:
    """Compose and check the jobs of a pipeline.

    Args:
        pipeline: the values of the file and of typed arguments.
        trust: the sources that the user trusts.
        folders: folders with further choices for groups.

    Raises:
        ConfigError: there is a mistake in a step, or in what it reads.
    """
    out = user_folder(pipeline.out, "output.dir")
    steps = {}
    for name, step in pipeline.steps.items():
        try:
            steps[name] = _composed(step, pipeline, out, trust, folders)
        except ConfigError as error:
            start = "" if f"{STEPS}.{name}" in str(error) else f"step {name}: "
            raise ConfigError(f"{start}{error}") from None
    for name, judges in pipeline.panels.items():
        check_panel(name, {judge: steps[judge].config.sampling for judge in judges})
    ordered = {name: steps[name] for name in in_order({n: s.reads for n, s in steps.items()})}
    limit = pipeline.keys.get(MOST_ERRORS, _MOST_ERRORS)
    most_errors = convert(limit, float, MOST_ERRORS)
    if not 0 <= most_errors <= 1:
        raise ConfigError(f"{MOST_ERRORS} must be a share from 0 to 1, got {limit}")
    exports = read_exports(pipeline, ordered)
    pushes = read_pushes(pipeline, ordered, exports, trust)
    return Pipeline(out, ordered, exports, pushes, most_errors)


def in_order(reads: Mapping[str, Sequence[str]]) -> list[str]:
    """Sort steps so that each comes after those that it reads, and otherwise keeps its position.
    Raises ConfigError if steps read each other in a circle."""
    ordered: list[str] = []
    remaining = dict(reads)
    while remaining:
        ready = next((n for n, others in remaining.items() if set(others) <= set(ordered)), None)
        if ready is None:
            raise ConfigError(
                f"steps read each other in a circle: {' → '.join(_circle(remaining))}: leave out "
                f"one {FROM}"
            )
        ordered.append(ready)
        del remaining[ready]
    return ordered


def _circle(left: Mapping[str, Sequence[str]]) -> Iterator[str]:
    """Return the names along a circle, from a step back to itself."""
    name, path = next(iter(left)), list[str]()
    while name not in path:
        path.append(name)
        name = next(other for other in left[name] if other in left)
    yield from [*path[path.index(name) :], name][::-1]


def _composed(
    source: StepValues, pipeline: PipelineValues, out: str, trust: Trust, folders: Sequence[Path]
) -> PipelineStep:
    """Compose and check the job of one step."""
    for parent in source.parents:
        _refuse_unknown(parent, pipeline, source.locations.get(FROM, FROM))
    groups = compose_groups(
        source.values, source.overrides, folders=folders, locations=source.locations
    ).groups
    if source.parents:
        paths = [f"{out}/{parent}" for parent in source.parents]
        groups["dataset"][_PATH] = paths[0] if len(paths) == 1 else paths
    tables = {}
    for index, step in enumerate(groups.get("rows") or ()):
        if isinstance(options := _options(step), dict) and FROM in options:
            at = f"rows[{index}]"
            if _PATH in options:
                raise ConfigError(f"{at}: {FROM} names a step, and path a folder: give one of them")
            tables[index] = name = options.pop(FROM)
            _refuse_unknown(name, pipeline, f"{at}.{FROM}")
            options[_PATH] = f"{out}/{name}"
    if isinstance(sampling := groups.get("sampling"), dict):
        if sampling.get("stream") is None:
            sampling["stream"] = source.name
    if isinstance(output := groups.get("output"), dict):
        output["dir"] = f"{out}/{source.name}"
    config = load_config(groups, trust)
    _refuse_of_jobs(config)
    return PipelineStep(source.name, config, source.parents, tables, source.waits)


def _options(step: Any) -> Any:
    """Return the options of a step of `rows`, which is given by its class or by its short name."""
    if isinstance(step, dict) and "_target_" not in step and len(step) == 1:
        return next(iter(step.values()))
    return step


def _refuse_unknown(name: Any, pipeline: PipelineValues, start: str) -> None:
    if name not in pipeline.steps:
        known = ", ".join(pipeline.steps)
        raise ConfigError(f"{start}: there is no step {name!r}: choose among {known}")


def _refuse_of_jobs(config: JobConfig) -> None:
    """Raise ConfigError for options that only single jobs can have."""
    if config.output.overwrite:
        raise ConfigError(
            "output.overwrite: a step that has changed gets a new folder, and its older ones stay: "
            "leave it out"
        )
    if config.launcher is not None:
        raise ConfigError(
            "launcher: a pipeline starts no workers: start its command in several processes or on "
            "several machines, which then share its steps"
        )
