"""What a pipeline file and the arguments of the command line say of each step.

A pipeline file is a job file with `steps`: keys above them are defaults of all steps.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from batchgen.config.compose.given_values import CHOICE
from batchgen.config.compose.job_file import read_job_file, read_job_text
from batchgen.config.compose.overrides import WORKER, parse_override
from batchgen.config.groups.config_keys import (
    EXPERIMENT,
    GROUPS,
    STEP_LISTS,
    choice_text,
    choices,
    nearest,
    nearest_key,
)
from batchgen.pipelines.run.judge import JUDGE, judge_values
from batchgen.storage.folder.pipeline_record import STEP_NAME
from batchgen.util.errors import ConfigError

STEPS, FROM = "steps", "from"
AFTER, COMPLETE = "after", "complete"
"""The key of a step that begins when what it reads is complete, and its value."""
EXPORT, PUSH, MOST_ERRORS = "export", "push", "most_errors"
PIPELINE = "pipeline"
"""The argument that names a ready pipeline, and the folder of conf/ that has them."""
KEYS = (EXPORT, PUSH, MOST_ERRORS)
"""Keys of the whole pipeline, beside `output.dir`."""
_DIR = "output.dir"
_STEP_KEY = re.compile(r"(\+\+|\+|~|)([\w-]+)\.(.+)", re.DOTALL)


@dataclass
class GivenStep:
    """What is said of one step: the steps that it reads, its values as `compose_groups` takes them,
    the places of its keys in the file, and the arguments `key=value` for it, in their order.
    `waits` says whether it begins when what it reads is complete."""

    name: str
    parents: tuple[str, ...]
    values: dict[str, Any]
    places: dict[str, str]
    waits: bool = False
    overrides: list[str] = field(default_factory=list)


@dataclass
class GivenPipeline:
    """What is said of a pipeline: its steps by name, the folder, and KEYS that are given. `places`
    are those of all keys in the file; `typed` are the keys among KEYS that were typed."""

    steps: dict[str, GivenStep]
    out: str
    keys: dict[str, Any]
    places: Mapping[str, str]
    typed: set[str] = field(default_factory=set)

    def at(self, key: str) -> str:
        """Where a key of the file stands, as the beginning of a message."""
        return f"{self.places.get(key, key)}: "


def ready_pipeline(
    name: str, folders: Sequence[Path] = ()
) -> tuple[dict[str, Any], dict[str, str]]:
    """What `read_job_file` returns, of a pipeline that comes with batchgen or lies in one of the
    user's folders; ConfigError if there is none of this name."""
    known = choices(PIPELINE, folders)
    if name not in known:
        guess = nearest(name, known)
        said = f"did you mean {guess}?" if guess else f"choose among {', '.join(known)}"
        raise ConfigError(
            f"{PIPELINE}={name}: there is no such pipeline: {said} (a file of your own is given "
            "without the key: batchgen FILE.yaml)"
        )
    for folder in folders:
        if (path := folder / PIPELINE / f"{name}.yaml").is_file():
            return read_job_file(path)
    return read_job_text(choice_text(PIPELINE, name), Path(f"conf/{PIPELINE}/{name}.yaml"))


def read_pipeline(
    values: Mapping[str, Any],
    places: Mapping[str, str],
    overrides: Sequence[str],
    reserved: Collection[str] = (),
) -> GivenPipeline:
    """Sort what a file and arguments say; ConfigError for what no step can be.

    Args:
        reserved: names that no step may have, besides those of groups and keys.
    """
    defaults = {key: value for key, value in values.items() if key not in (STEPS, *KEYS)}
    common = _flat(defaults, places, "")
    given = values[STEPS]
    if not isinstance(given, dict) or not given:
        raise ConfigError(f"{places.get(STEPS, STEPS)}: give each step by its name and its keys")
    taken = {
        *GROUPS,
        *STEP_LISTS,
        EXPERIMENT,
        PIPELINE,
        STEPS,
        FROM,
        AFTER,
        WORKER,
        *KEYS,
        *reserved,
    }
    for name in given:
        _check_name(name, places, taken)
    out = [common.pop(_DIR)] if _DIR in common else []
    steps = {name: _step(name, step, common, places) for name, step in given.items()}
    pipeline = GivenPipeline(steps, "", {key: values[key] for key in KEYS if key in values}, places)
    for argument in overrides:
        if argument.partition("=")[0].lstrip("+") == _DIR:
            out.append(parse_override(argument).value())
        else:
            _add_override(pipeline, argument)
    if not out or not isinstance(out[-1], str) or not out[-1]:
        raise ConfigError("a pipeline needs a folder for its steps: give output.dir=FOLDER")
    pipeline.out = out[-1]
    return pipeline


def _check_name(name: Any, places: Mapping[str, str], taken: Collection[str]) -> None:
    start = places.get(f"{STEPS}.{name}", f"{STEPS}.{name}")
    if not isinstance(name, str) or not STEP_NAME.fullmatch(name):
        raise ConfigError(
            f"{start}: {name!r} is no name of a step: up to 41 letters, digits, _ and -, the first "
            "one a letter"
        )
    if name in taken:
        raise ConfigError(f"{start}: {name} has another meaning here: give the step another name")


def _step(name: str, given: Any, common: Mapping[str, Any], places: Mapping[str, str]) -> GivenStep:
    """A step with the defaults that it does not replace."""
    prefix = f"{STEPS}.{name}."
    start = places.get(prefix[:-1], prefix[:-1])
    if not isinstance(given, dict):
        raise ConfigError(f"{start} must be a mapping of keys, got {given!r:.50}")
    values = dict(given)
    parents = _parents(values.pop(FROM, ()), places.get(prefix + FROM, prefix + FROM))
    judged = values.pop(JUDGE, None)
    waits = _waits(values.pop(AFTER, None), parents, places.get(prefix + AFTER, prefix + AFTER))
    own = _flat(values, places, prefix)
    if judged is not None:
        own, parents = _with_judge(own, judged, parents, places.get(prefix + JUDGE, prefix + JUDGE))
    if _DIR in own:
        raise ConfigError(
            f"{places.get(prefix + _DIR, prefix + _DIR)}: a step writes into a folder below the "
            f"pipeline's: leave it out, and give {_DIR} above steps"
        )
    if parents and ("dataset.path" in own or own.get("dataset", "job") != "job"):
        key = "dataset.path" if "dataset.path" in own else "dataset"
        raise ConfigError(
            f"{places.get(prefix + key, prefix + key)}: the step has rows {FROM} {parents[0]}: "
            f"leave out {FROM} or {key}"
        )
    whole = {key for key in own if key in GROUPS}
    if parents:
        whole.add("dataset")
        own["dataset"] = "job"
    kept = {key: value for key, value in common.items() if key.partition(".")[0] not in whole}
    of_file = {key: place for key, place in places.items() if not key.startswith(f"{STEPS}.")}
    of_step = {k.removeprefix(prefix): v for k, v in places.items() if k.startswith(prefix)}
    return GivenStep(name, parents, {**kept, **own}, {**of_file, **of_step}, waits)


def _with_judge(
    own: dict[str, Any], judged: Any, parents: tuple[str, ...], start: str
) -> tuple[dict[str, Any], tuple[str, ...]]:
    """The keys of a step that judges others, and the step whose answers are its rows. What the
    step says itself counts; a group of which it makes a choice is all its own."""
    ready = _flat(judge_values(judged, parents, start), {}, "")
    chosen = {key for key in own if key in GROUPS}
    kept = {key: value for key, value in ready.items() if key.partition(".")[0] not in chosen}
    return {**kept, **own}, parents[:1]


def _parents(given: Any, start: str) -> tuple[str, ...]:
    """The names in `from: a` and `from: [a, b]`."""
    names = [given] if isinstance(given, str) else list(given) if isinstance(given, list) else given
    if not isinstance(names, list | tuple) or not all(isinstance(name, str) for name in names):
        raise ConfigError(f"{start} must be the name of a step, or a list of names")
    if given != () and not names:
        raise ConfigError(f"{start} names no step")
    if len(set(names)) < len(names):
        raise ConfigError(f"{start} names a step twice")
    return tuple(names)


def _waits(given: Any, parents: tuple[str, ...], start: str) -> bool:
    """Whether a step says `after: complete`."""
    if given is None:
        return False
    if given != COMPLETE:
        raise ConfigError(f"{start} must be {COMPLETE}, got {given!r:.50}")
    if not parents:
        raise ConfigError(f"{start}: the step reads no other step ({FROM}): leave it out")
    return True


def _flat(values: Mapping[str, Any], places: Mapping[str, str], prefix: str) -> dict[str, Any]:
    """The values with keys of groups by their full names, and choices under those of groups. A
    group with a class of its own stays whole."""
    found: dict[str, Any] = {}

    def add(key: str, value: Any) -> None:
        if key in found:
            raise ConfigError(f"{places.get(prefix + key, prefix + key)}: {key} is there twice")
        found[key] = value

    for key, value in values.items():
        if key in GROUPS and isinstance(value, dict) and "_target_" not in value:
            for name, item in value.items():
                add(key if name == CHOICE else f"{key}.{name}", item)
        else:
            add(key, value)
    return found


def _add_override(pipeline: GivenPipeline, argument: str) -> None:
    """Give an argument to the steps that it is for."""
    key = argument.partition("=")[0].lstrip("+~")
    group = key.partition(".")[0]
    if key in KEYS:
        pipeline.keys[key] = parse_override(argument).value()
        pipeline.typed.add(key)
    elif group in pipeline.steps:
        _add_to_step(pipeline.steps[group], argument)
    elif group in (*GROUPS, *STEP_LISTS, EXPERIMENT, WORKER):
        for step in pipeline.steps.values():
            if not (step.parents and group == "dataset"):
                step.overrides.append(argument)
    elif group in (STEPS, FROM):
        raise ConfigError(
            f"{argument}: which steps there are, and what they read, stands in the pipeline file"
        )
    else:
        guess = nearest(group, [*pipeline.steps, *GROUPS, *KEYS]) or nearest_key(key)
        raise ConfigError(
            f"{argument}: there is no step, group or key {group}: "
            + (f"did you mean {guess}?" if guess else f"steps are {', '.join(pipeline.steps)}")
        )


def _add_to_step(step: GivenStep, argument: str) -> None:
    match = _STEP_KEY.fullmatch(argument)
    if match is None:
        raise ConfigError(
            f"{argument}: {step.name} is a step: give one of its keys, {step.name}.KEY=VALUE"
        )
    sign, _, rest = match.groups()
    key = rest.partition("=")[0]
    if key.partition(".")[0] in (FROM, AFTER, STEPS):
        raise ConfigError(f"{argument}: what a step reads stands in the pipeline file")
    if key == _DIR:
        raise ConfigError(
            f"{argument}: a step writes into a folder below the pipeline's, which {_DIR} says"
        )
    if step.parents and key in ("dataset", "dataset.path", "dataset.kind"):
        raise ConfigError(
            f"{argument}: the step has rows {FROM} {step.parents[0]}, as the pipeline file says"
        )
    step.overrides.append(sign + rest)
