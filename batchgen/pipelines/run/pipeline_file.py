"""Reads pipeline files, and sorts the values of the file and of typed arguments by step.

A pipeline file is a job file with the key `steps`; the keys above it are defaults for all steps.
`read_pipeline` returns the values from which `compose_pipeline` makes a pipeline.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from batchgen.config.compose.job_file import read_job_file, read_job_text
from batchgen.config.compose.overrides import WORKER, parse_override
from batchgen.config.compose.user_values import CHOICE
from batchgen.config.groups.config_keys import (
    EXPERIMENT,
    GROUPS,
    STEP_LISTS,
    choice_text,
    choices,
    nearest,
)
from batchgen.pipelines.run.judge import JUDGE, judge_values
from batchgen.pipelines.run.judge_panel import MODELS, Panel, panel_steps
from batchgen.pipelines.run.pipeline_values import (
    AFTER,
    COMPLETE,
    DIR,
    FROM,
    KEYS,
    PIPELINE,
    STEPS,
    PipelineValues,
    StepValues,
    add_override,
)
from batchgen.storage.folder.pipeline_record import STEP_NAME
from batchgen.util.errors import ConfigError


def ready_pipeline(
    name: str, folders: Sequence[Path] = ()
) -> tuple[dict[str, Any], dict[str, str]]:
    """Read a pipeline that comes with batchgen or lies in one of the user's folders.

    Returns:
        The values and the location of each key, as `read_job_file` does.

    Raises:
        ConfigError: there is no pipeline with this name.
    """
    known = choices(PIPELINE, folders)
    if name not in known:
        guess = nearest(name, known)
        hint = f"did you mean {guess}?" if guess else f"choose among {', '.join(known)}"
        raise ConfigError(
            f"{PIPELINE}={name}: there is no such pipeline: {hint} (a file of your own is given "
            "without the key: batchgen FILE.yaml)"
        )
    for folder in folders:
        if (path := folder / PIPELINE / f"{name}.yaml").is_file():
            return read_job_file(path)
    return read_job_text(choice_text(PIPELINE, name), Path(f"conf/{PIPELINE}/{name}.yaml"))


def read_pipeline(
    values: Mapping[str, Any],
    locations: Mapping[str, str],
    overrides: Sequence[str],
    reserved: Collection[str] = (),
) -> PipelineValues:
    """Sort the values of a file and the typed arguments by step.

    Args:
        values: the values of the file.
        locations: key → its location in the file, for messages.
        overrides: the typed arguments.
        reserved: names that no step may have, besides the names of groups and keys.

    Raises:
        ConfigError: a value is not valid for a step, or the folder is missing.
    """
    defaults = {key: value for key, value in values.items() if key not in (STEPS, *KEYS)}
    common = _flat(defaults, locations, "")
    steps = values[STEPS]
    if not isinstance(steps, dict) or not steps:
        raise ConfigError(f"{locations.get(STEPS, STEPS)}: give each step by its name and its keys")
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
    for name in steps:
        _check_name(name, locations, taken)
    out = [common.pop(DIR)] if DIR in common else []
    pipeline = PipelineValues(
        {}, "", {key: values[key] for key in KEYS if key in values}, locations
    )
    for name, step in steps.items():
        _add_steps(pipeline, name, step, common, steps)
    for argument in overrides:
        if argument.partition("=")[0].lstrip("+") == DIR:
            out.append(parse_override(argument).value())
        else:
            add_override(pipeline, argument)
    if not out or not isinstance(out[-1], str) or not out[-1]:
        raise ConfigError("a pipeline needs a folder for its steps: give output.dir=FOLDER")
    pipeline.out = out[-1]
    return pipeline


def _check_name(name: Any, locations: Mapping[str, str], taken: Collection[str]) -> None:
    """Raise ConfigError if a step cannot have this name."""
    start = locations.get(f"{STEPS}.{name}", f"{STEPS}.{name}")
    if not isinstance(name, str) or not STEP_NAME.fullmatch(name):
        raise ConfigError(
            f"{start}: {name!r} is not the name of a step: use up to 41 letters, digits, _ and "
            "-, the first one a letter"
        )
    if name in taken:
        raise ConfigError(f"{start}: {name} is a reserved name: give the step another name")


def _add_steps(
    pipeline: PipelineValues,
    name: str,
    value: Any,
    common: Mapping[str, Any],
    others: Mapping[str, Any],
) -> None:
    """Add a step of the file to the pipeline. A step with several judges becomes one step per
    judge.

    Args:
        common: the defaults for all steps.
        others: the steps of the file, by name.
    """
    locations, prefix = pipeline.locations, f"{STEPS}.{name}"
    start = locations.get(prefix, prefix)
    if not isinstance(value, dict):
        raise ConfigError(f"{start} must be a mapping of keys, got {value!r:.50}")
    judge = value.get(JUDGE)
    if not isinstance(judge, dict) or MODELS not in judge:
        pipeline.steps[name] = _step(name, value, common, locations)
        return
    expanded = panel_steps(name, value, locations.get(f"{prefix}.{JUDGE}", f"{prefix}.{JUDGE}"))
    for step_name, (values, panel) in expanded.items():
        if step_name != name:
            _check_name(step_name, locations, others)
        step = _step(name, values, common, locations, panel)
        pipeline.steps[step_name] = replace(step, name=step_name)
    pipeline.panels[name] = [*expanded]


def _step(
    name: str,
    options: Mapping[str, Any],
    common: Mapping[str, Any],
    locations: Mapping[str, str],
    panel: Panel | None = None,
) -> StepValues:
    """Return the values of a step, including the defaults that it does not replace.

    Args:
        options: the keys of the step in the file.
        panel: for the last of several judges, the other judges.
    """
    prefix = f"{STEPS}.{name}."
    values = dict(options)
    parents = _parents(values.pop(FROM, ()), locations.get(prefix + FROM, prefix + FROM))
    judged = values.pop(JUDGE, None)
    waits = _waits(values.pop(AFTER, None), parents, locations.get(prefix + AFTER, prefix + AFTER))
    flat_values = _flat(values, locations, prefix)
    if judged is not None:
        flat_values, parents = _with_judge(
            flat_values, judged, parents, locations.get(prefix + JUDGE, prefix + JUDGE)
        )
        flat_values = flat_values if panel is None else panel.values(flat_values)
    if DIR in flat_values:
        raise ConfigError(
            f"{locations.get(prefix + DIR, prefix + DIR)}: a step writes into a folder inside "
            f"the pipeline's: leave it out, and give {DIR} above steps"
        )
    if parents and ("dataset.path" in flat_values or flat_values.get("dataset", "job") != "job"):
        key = "dataset.path" if "dataset.path" in flat_values else "dataset"
        raise ConfigError(
            f"{locations.get(prefix + key, prefix + key)}: the step has rows {FROM} {parents[0]}: "
            f"leave out {FROM} or {key}"
        )
    whole = {key for key in flat_values if key in GROUPS}
    if parents:
        whole.add("dataset")
        flat_values["dataset"] = "job"
    kept = {key: value for key, value in common.items() if key.partition(".")[0] not in whole}
    of_file = {
        key: location for key, location in locations.items() if not key.startswith(f"{STEPS}.")
    }
    of_step = {k.removeprefix(prefix): v for k, v in locations.items() if k.startswith(prefix)}
    return StepValues(name, parents, {**kept, **flat_values}, {**of_file, **of_step}, waits)


def _with_judge(
    step_values: dict[str, Any], judged: Any, parents: tuple[str, ...], start: str
) -> tuple[dict[str, Any], tuple[str, ...]]:
    """Return the keys of a judging step, and the parent whose answers are its rows.

    Keys that the step sets itself take precedence. Of a group for which the step names a choice, no
    key is added.
    """
    ready = _flat(judge_values(judged, parents, start), {}, "")
    chosen = {key for key in step_values if key in GROUPS}
    kept = {key: value for key, value in ready.items() if key.partition(".")[0] not in chosen}
    return {**kept, **step_values}, parents[:1]


def _parents(value: Any, start: str) -> tuple[str, ...]:
    """Return the names in `from: a` or `from: [a, b]`."""
    names = [value] if isinstance(value, str) else list(value) if isinstance(value, list) else value
    if not isinstance(names, list | tuple) or not all(isinstance(name, str) for name in names):
        raise ConfigError(f"{start} must be the name of a step, or a list of names")
    if value != () and not names:
        raise ConfigError(f"{start} names no step")
    if len(set(names)) < len(names):
        raise ConfigError(f"{start} names a step twice")
    return tuple(names)


def _waits(value: Any, parents: tuple[str, ...], start: str) -> bool:
    """Whether a step has `after: complete`."""
    if value is None:
        return False
    if value != COMPLETE:
        raise ConfigError(f"{start} must be {COMPLETE}, got {value!r:.50}")
    if not parents:
        raise ConfigError(f"{start}: the step reads no other step ({FROM}): leave it out")
    return True


def _flat(values: Mapping[str, Any], locations: Mapping[str, str], prefix: str) -> dict[str, Any]:
    """Return the values by full names, such as `model.path`. The choice of a group is under the
    group's name. A group with its own class stays a mapping."""
    flat: dict[str, Any] = {}

    def add(key: str, value: Any) -> None:
        if key in flat:
            raise ConfigError(f"{locations.get(prefix + key, prefix + key)}: {key} appears twice")
        flat[key] = value

    for key, value in values.items():
        if key in GROUPS and isinstance(value, dict) and "_target_" not in value:
            for name, item in value.items():
                add(key if name == CHOICE else f"{key}.{name}", item)
        else:
            add(key, value)
    return flat
