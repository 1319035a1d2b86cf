"""The values of a pipeline and of its steps before the jobs are composed. `pipeline_file` fills
them in, and `compose_pipeline` reads them."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from batchgen.config.compose.overrides import WORKER, parse_override
from batchgen.config.groups.config_keys import EXPERIMENT, GROUPS, STEP_LISTS, nearest, nearest_key
from batchgen.pipelines.run.judge import JUDGE
from batchgen.pipelines.run.judge_panel import MODELS
from batchgen.util.errors import ConfigError

STEPS, FROM = "steps", "from"
AFTER, COMPLETE = "after", "complete"
"""`after: complete` in a step lets it begin only when the steps that it reads are complete."""
EXPORT, PUSH, MOST_ERRORS = "export", "push", "most_errors"
PIPELINE = "pipeline"
"""The argument that names a ready pipeline, and the folder in conf/ with these pipelines."""
KEYS = (EXPORT, PUSH, MOST_ERRORS)
"""The keys of the whole pipeline, besides `output.dir`."""
DIR = "output.dir"
_STEP_KEY = re.compile(r"(\+\+|\+|~|)([\w-]+)\.(.+)", re.DOTALL)
"""An argument for a step: the sign of an override, the step's name, and the rest."""


@dataclass
class StepValues:
    """The values of one step.

    Attributes:
        parents: the steps whose answers are its rows.
        values: its values, in the form that `compose_groups` takes.
        locations: key → its location in the file.
        waits: whether it begins only when its parents are complete.
        overrides: the typed arguments `key=value` for it, in order.
    """

    name: str
    parents: tuple[str, ...]
    values: dict[str, Any]
    locations: dict[str, str]
    waits: bool = False
    overrides: list[str] = field(default_factory=list)


@dataclass
class PipelineValues:
    """The values of a pipeline.

    Attributes:
        steps: name → the values of the step.
        out: the folder of the pipeline.
        keys: those of KEYS that are set, with their values.
        locations: key → its location in the file.
        typed: those of KEYS that were typed as arguments.
        panels: a step with several judges → the names of the steps that replace it.
    """

    steps: dict[str, StepValues]
    out: str
    keys: dict[str, Any]
    locations: Mapping[str, str]
    typed: set[str] = field(default_factory=set)
    panels: dict[str, list[str]] = field(default_factory=dict)

    def at(self, key: str) -> str:
        """Return the location of a key in the file, as the beginning of a message."""
        return f"{self.locations.get(key, key)}: "


def add_override(pipeline: PipelineValues, argument: str) -> None:
    """Add a typed argument to the steps that it applies to."""
    key = argument.partition("=")[0].lstrip("+~")
    group = key.partition(".")[0]
    if key in KEYS:
        pipeline.keys[key] = parse_override(argument).value()
        pipeline.typed.add(key)
    elif group in pipeline.steps:
        _add_to_steps(pipeline, group, argument)
    elif group in (*GROUPS, *STEP_LISTS, EXPERIMENT, WORKER):
        for step in pipeline.steps.values():
            if not (step.parents and group == "dataset"):
                step.overrides.append(argument)
    elif group in (STEPS, FROM):
        raise ConfigError(f"{argument}: the steps and what they read are set in the pipeline file")
    else:
        guess = nearest(group, [*pipeline.steps, *GROUPS, *KEYS]) or nearest_key(key)
        raise ConfigError(
            f"{argument}: there is no step, group or key {group}: "
            + (f"did you mean {guess}?" if guess else f"steps are {', '.join(pipeline.steps)}")
        )


def _add_to_steps(pipeline: PipelineValues, name: str, argument: str) -> None:
    """Add an argument to a step, or to all its judges if it has several."""
    names = pipeline.panels.get(name, [name])
    key = argument.partition("=")[0].partition(".")[2]
    if len(names) > 1 and key in ("model", "model.path", "post"):
        raise ConfigError(
            f"{argument}: {name} has several judges, whose models and post steps follow from "
            f"{JUDGE}.{MODELS} in the pipeline file"
        )
    for step_name in names:
        _add_to_step(pipeline.steps[step_name], argument)


def _add_to_step(step: StepValues, argument: str) -> None:
    match = _STEP_KEY.fullmatch(argument)
    if match is None:
        raise ConfigError(
            f"{argument}: {step.name} is a step: give one of its keys, {step.name}.KEY=VALUE"
        )
    sign, _, rest = match.groups()
    key = rest.partition("=")[0]
    if key.partition(".")[0] in (FROM, AFTER, STEPS):
        raise ConfigError(f"{argument}: what a step reads is set in the pipeline file")
    if key == DIR:
        raise ConfigError(
            f"{argument}: a step writes into a folder inside the pipeline's, which {DIR} names"
        )
    if step.parents and key in ("dataset", "dataset.path", "dataset.kind"):
        raise ConfigError(
            f"{argument}: the step has rows {FROM} {step.parents[0]}, as the pipeline file says"
        )
    step.overrides.append(sign + rest)
