"""Turns composed groups into a JobConfig with checked types and ranges, and a JobConfig back into
plain values.

    load_config({"model": {"path": "m"}, "sampling": {"n": 4}, …}, trust)  →  JobConfig
    resolved(config)  →  {"model": {"path": "m", "dtype": "auto", …}, …}
"""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Collection, Mapping
from typing import Any

from omegaconf import OmegaConf
from omegaconf.errors import OmegaConfBaseException

from batchgen.config.compose.step_configs import step_configs, target_and_options
from batchgen.config.compose.trust import Trust
from batchgen.config.compose.value_references import refuse_endless, refuse_resolvers
from batchgen.config.groups.class_names import short_step
from batchgen.config.groups.config_keys import STEP_LISTS, choice_values, choices
from batchgen.config.groups.constraint_config import (
    CONSTRAINT_KINDS,
    ConstraintConfig,
    with_contents,
)
from batchgen.config.groups.convert_value import (
    MISSING,
    build,
    check_keys,
    key_of,
    plain_value,
)
from batchgen.config.groups.job_config import (
    PROMPT_KINDS,
    DatasetConfig,
    EngineGroup,
    JobConfig,
    LauncherConfig,
    ModelGroup,
    PromptConfig,
    StrategyConfig,
)
from batchgen.config.groups.launcher_config import job_launcher
from batchgen.config.groups.model_sampling import with_model_values
from batchgen.config.groups.output_config import OutputConfig, ProgressConfig, ScoreConfig
from batchgen.config.groups.sampling_config import SamplingConfig
from batchgen.config.groups.workers_config import BudgetConfig, WorkersConfig
from batchgen.util.errors import ConfigError
from batchgen.util.text.plain_yaml import yaml_text


def load_config(
    values: dict[str, Any], trust: Trust, *, resolvers: Collection[str] = ()
) -> JobConfig:
    """Build the configuration of one job from its groups, with all types and ranges checked.

    `trust` decides which code they may name; `resolvers` of OmegaConf may be used. A mistake, or
    code that the user does not trust, is a ConfigError.
    """
    refuse_resolvers(values, resolvers)
    refuse_endless(values)
    _check_kinds(values)
    try:
        groups = OmegaConf.to_container(OmegaConf.create(values), resolve=True)
    except OmegaConfBaseException as error:
        key, reason = error.full_key, str(error).splitlines()[0]
        raise ConfigError(
            f"{key or 'the configuration'} cannot be resolved: {reason}: ${{KEY}} takes the value "
            "of another key; write \\${ for the text"
        ) from None
    if not isinstance(groups, dict):
        raise ConfigError("the configuration must be a mapping of groups (model, dataset, …)")
    names = [f.name for f in dataclasses.fields(JobConfig)]
    # The config.yaml of a job of an earlier version may lack these groups.
    groups.setdefault("constraint", {"kind": "none"})
    groups.setdefault("launcher", {"_target_": None})
    for name in ("progress", "score", "workers", "budget"):
        groups.setdefault(name, {})
    for name in STEP_LISTS:
        groups.setdefault(name, [])
    check_keys(groups, allowed=names, required=names, prefix="")
    for name in names:
        if name not in STEP_LISTS and not isinstance(groups[name], dict):
            raise ConfigError(
                f"{name} must be a group of keys, got {groups[name]!r}: see conf/{name}/"
            )
    if isinstance(path := groups["model"].get("path"), str):
        revision = groups["model"].get("revision")
        groups["sampling"] = with_model_values(groups["sampling"], path, revision)
    config = JobConfig(
        model=build(ModelGroup, groups["model"], "model"),
        dataset=build(DatasetConfig, groups["dataset"], "dataset"),
        rows=step_configs(groups["rows"], "rows"),
        prompt=_build_prompt(groups["prompt"]),
        sampling=build(SamplingConfig, groups["sampling"], "sampling"),
        strategy=StrategyConfig(**target_and_options(groups["strategy"], "strategy.")),
        constraint=constraint_config(groups["constraint"]),
        engine=build(EngineGroup, groups["engine"], "engine"),
        workers=build(WorkersConfig, groups["workers"], "workers"),
        launcher=_build_launcher(groups["launcher"]),
        post=step_configs(groups["post"], "post"),
        score=build(ScoreConfig, groups["score"], "score"),
        budget=build(BudgetConfig, groups["budget"], "budget"),
        output=build(OutputConfig, groups["output"], "output"),
        progress=build(ProgressConfig, groups["progress"], "progress"),
    )
    trust.check(resolved(config))
    job_launcher(config)  # checks its keys, now that its class may be imported
    return config


def _check_kinds(groups: Any) -> None:
    """Check that groups have the key that names their kind. A choice in the user's folders lacks it
    unless it begins with one of batchgen's choices.

    Raises:
        ConfigError: the key is missing.
    """
    for group, key, usual in (
        *(("dataset", "kind", "files"), ("prompt", "kind", "chat")),
        ("strategy", "_target_", "ar"),
    ):
        values = groups.get(group) if isinstance(groups, dict) else None
        if isinstance(values, dict) and values and key not in values:
            raise ConfigError(
                f"{group}.{key} is missing: begin your choice with one of batchgen's, with a line "
                f"such as `defaults: [{usual}]`; there are {', '.join(choices(group))}"
            )


def constraint_config(values: dict[str, Any]) -> ConstraintConfig:
    """Build the group `constraint` from its plain values."""
    kind = values.get("kind", MISSING)
    if not isinstance(kind, str) or kind not in CONSTRAINT_KINDS:
        raise ConfigError(
            f"constraint.kind must be one of {', '.join(CONSTRAINT_KINDS)}, got {kind!r}"
        )
    return build(CONSTRAINT_KINDS[kind], with_contents(values), "constraint")


def resolved(config: JobConfig) -> dict[str, Any]:
    """The configuration as plain values, under the keys that users write."""
    groups = dataclasses.asdict(config)
    data = groups["dataset"]  # only the keys of its kind are kept
    groups["dataset"] = {key: data[key] for key in choice_values("dataset", data["kind"])}
    groups["prompt"] = {key_of(name): value for name, value in groups["prompt"].items()}
    for name in ("strategy", "launcher"):
        groups[name] = _with_target(groups[name] or {"target": None, "options": {}})
    for name in STEP_LISTS:
        groups[name] = [short_step(_with_target(step)) for step in groups[name]]
    return {name: plain_value(group) for name, group in groups.items()}


def job_file_text(config: JobConfig) -> str:
    """The text of config.yaml, which is a job file: `batchgen OUT/config.yaml` runs it."""
    groups = resolved(config)
    groups["workers"]["name"] = None  # belongs to one process
    return yaml_text(escaped_text(groups))


def escaped_text(value: Any) -> Any:
    """The value with every `${` escaped, so that OmegaConf reads it as text, not as a reference."""
    if isinstance(value, dict):
        return {key: escaped_text(item) for key, item in value.items()}
    if isinstance(value, list):
        return [escaped_text(item) for item in value]
    # Backslashes before it are doubled, because OmegaConf halves them there.
    return re.sub(r"(\\*)\$\{", r"\1\1\\${", value) if isinstance(value, str) else value


def _build_prompt(values: dict[str, Any]) -> PromptConfig:
    kind = values.get("kind", MISSING)
    if not isinstance(kind, str) or kind not in PROMPT_KINDS:
        raise ConfigError(f"prompt.kind must be one of {', '.join(PROMPT_KINDS)}, got {kind!r}")
    return build(PROMPT_KINDS[kind], values, "prompt")


def _build_launcher(values: dict[str, Any]) -> LauncherConfig | None:
    if values.get("_target_", MISSING) is None:
        check_keys(values, allowed=["_target_"], required=[], prefix="launcher.")
        return None
    return LauncherConfig(**target_and_options(values, "launcher."))


def _with_target(values: Mapping[str, Any]) -> dict[str, Any]:
    """A class and its options, as users write them."""
    return {"_target_": values["target"], **values["options"]}
