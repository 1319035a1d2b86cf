"""Composes a job's configuration from a job file or mapping and from `key=value` arguments.

Hydra composes the choices of groups and the experiments. Single keys are set here instead, so that
text stays as it was typed and error messages are ours. The command line and `batchgen.run_job` call
`compose_groups` and `compose`.
"""

from __future__ import annotations

import copy
import functools
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from omegaconf import Container, OmegaConf
from omegaconf.errors import OmegaConfBaseException

from batchgen.config.compose.experiments import leave_out_others
from batchgen.config.compose.group_choices import inferred_choice
from batchgen.config.compose.load_config import load_config
from batchgen.config.compose.overrides import Override, parse_override
from batchgen.config.compose.trust import TYPED
from batchgen.config.compose.user_values import UserValues
from batchgen.config.groups.config_keys import (
    EXPERIMENT,
    GROUPS,
    PARTS,
    STEP_LISTS,
    nearest_key,
)
from batchgen.config.groups.job_config import JobConfig
from batchgen.util.errors import ConfigError

_GLOBAL = (
    "the file of an experiment must have the line `# @package _global_` at the top, which makes "
    "its keys those of the job"
)


def compose(values: Mapping[str, Any], overrides: Sequence[str] = ()) -> JobConfig:
    """Compose the configuration of one job.

    Args:
        values: the job as in a job file. They come from the calling program, so they may name any
            code. A key is a group with its choice ("model": "hf"), a group with its keys ("model":
            {"path": "…"}, where "choice": "hf" can be one of them), one key with its full name
            ("sampling.n": 4), or a list of steps ("post": […]).
        overrides: arguments `key=value` as on the command line. They win over `values`, and a
            choice among them replaces everything that `values` sets in its group.
    """
    return load_config(compose_groups(values, overrides).groups, TYPED)


@dataclass(frozen=True)
class Composed:
    """The groups of a job with all their keys, not checked yet.

    Attributes:
        groups: group → its keys and values.
        choices: group → its choice. A class of the user's has no choice.
    """

    groups: dict[str, Any]
    choices: dict[str, str]


def compose_groups(
    values: Mapping[str, Any],
    overrides: Sequence[str] = (),
    *,
    folders: Sequence[Path] = (),
    locations: Mapping[str, str] | None = None,
) -> Composed:
    """Merge the choices and keys of a job; see `compose` for `values` and `overrides`.

    Args:
        folders: folders with more choices, laid out like conf/.
        locations: key → its file and line in a job file, for error messages.
    """
    user_values, parsed = collect_values(values, overrides, folders=folders, locations=locations)
    groups = _composed(user_values)
    for key, value in user_values.keys.items():
        _set(groups, user_values, key, value)
    for override in parsed:
        if override.group not in STEP_LISTS and (override.names or override.sign == "~"):
            _apply(groups, user_values, override)
    groups |= user_values.steps
    # In the order of a job file; unknown groups, which `load_config` refuses, come last.
    ordered = {name: groups[name] for name in [*PARTS, *groups] if name in groups}
    return Composed(ordered, user_values.choices)


def collect_values(
    values: Mapping[str, Any],
    overrides: Sequence[str] = (),
    *,
    folders: Sequence[Path] = (),
    locations: Mapping[str, str] | None = None,
) -> tuple[UserValues, list[Override]]:
    """Collect the user's values, with the choices that they imply, and parse the arguments."""
    user_values = UserValues(folders, locations or {})
    user_values.add_values(values)
    parsed = [parse_override(argument) for argument in overrides]
    for override in parsed:
        user_values.add_override(override)
    _check_greedy(user_values, parsed)
    if not user_values.experiments:
        for group in GROUPS:
            named = user_values.named(group)
            if named and group not in user_values.choices and group not in user_values.whole:
                if (choice := inferred_choice(group, named)) is not None:
                    user_values.choices[group] = choice
    return user_values, parsed


def _check_greedy(collected: UserValues, parsed: Sequence[Override]) -> None:
    """Refuse a temperature together with `sampling=greedy`."""
    key = "sampling.temperature"
    typed = [override.value() for override in parsed if override.key == key and override.text]
    value = [collected.keys.get(key), *typed][-1]  # the last one wins
    if (
        collected.choices.get("sampling") == "greedy"
        and isinstance(value, int | float)
        and value > 0
    ):
        raise ConfigError(
            f"sampling=greedy always takes the most likely token, but {key}={value} draws at "
            "random: drop one of the two, or use sampling=sample"
        )


def _composed(collected: UserValues) -> dict[str, Any]:
    """The groups of the user's choices, before single keys are set."""
    overrides = [f"{group}={choice}" for group, choice in collected.choices.items()]
    overrides += [f"+{EXPERIMENT}={name}" for name in collected.experiments[:1]]
    if len(collected.experiments) > 1:
        raise ConfigError(f"experiment: choose one of {', '.join(collected.experiments)}")
    from batchgen.config.compose.choice_files import search_path

    overrides += search_path(collected.folders)
    # The user's files may have changed since they were last read, so they are not cached:
    # `__wrapped__` is the function without its cache.
    read = _groups_of.__wrapped__ if collected.folders else _groups_of
    groups, composed = copy.deepcopy(read(tuple(overrides)))
    for experiment in collected.experiments:
        own_columns = "columns" in collected.named("output")
        leave_out_others(groups, experiment, collected.choices, own_columns=own_columns)
    collected.choices = {group: composed[group] for group in GROUPS if group not in collected.whole}
    return {**groups, **collected.whole}


@functools.lru_cache(maxsize=64)
def _groups_of(overrides: tuple[str, ...]) -> tuple[dict[str, Any], dict[str, str]]:
    """The groups that Hydra composes of choices, and the choice of each group."""
    # Hydra takes a tenth of a second to load, and a job that was refused so far does not need it.
    from hydra import compose as compose_choices
    from hydra import initialize_config_module
    from hydra.core.global_hydra import GlobalHydra
    from hydra.errors import HydraException

    GlobalHydra.instance().clear()
    try:
        with initialize_config_module("batchgen.conf", version_base="1.3"):
            composed = compose_choices("config", overrides=[*overrides], return_hydra_config=True)
    except (HydraException, OmegaConfBaseException) as error:
        typed = " ".join(text for text in overrides if not text.startswith("hydra."))
        reason = str(error).partition("\nConfig search path")[0]
        if f"@{EXPERIMENT}." in reason:
            reason = _GLOBAL
        raise ConfigError(f"the choices {typed} do not fit together: {reason}") from None
    names = [str(name) for name in composed if name != "hydra"]
    for name in names:
        _check_group(name, composed[name])
    groups = {name: OmegaConf.to_container(composed[name]) for name in names}
    return groups, dict(composed.hydra.runtime.choices)


def _check_group(name: str, value: Any) -> None:
    """Check one entry of the composed choices. Raises ConfigError if it is a single key, or if an
    experiment's file lacks its first line."""
    if name == EXPERIMENT:
        raise ConfigError(f"{EXPERIMENT}: {_GLOBAL}")
    if isinstance(value, Container):
        return
    if name in PARTS:
        kind = "list of steps" if name in STEP_LISTS else "group of keys"
        raise ConfigError(f"{name} must be a {kind}, got {value!r}: leave it out for the default")
    key = name if "." in name else nearest_key(name) or "sampling.n"
    group, _, rest = key.partition(".")
    raise ConfigError(
        f"{name} is not a group of keys: files of choices write a group with its keys in it, "
        f"such as `{group}: {{{rest}: …}}`"
    )


def _set(groups: dict[str, Any], collected: UserValues, key: str, value: Any) -> None:
    """Set a key of the job file."""
    group, _, name = key.partition(".")
    # A key of a mapping that is the value of a key, such as `template_kwargs.thinking`.
    if name not in groups[group] and name.partition(".")[0] in groups[group]:
        _set_below(groups[group], name.split("."), value, collected.at(key) + key)
        return
    if name not in groups[group]:
        raise ConfigError(collected.at(key) + collected.unknown_key(key))
    groups[group][name] = value


def _apply(groups: dict[str, Any], collected: UserValues, override: Override) -> None:
    """Set, add or remove a key, as an argument says."""
    start, key = f"{override.argument}: ", override.key
    if override.sign == "~" and not override.names:
        groups.pop(key, None)
        return
    group = groups.get(override.group)
    if not isinstance(group, dict):
        raise ConfigError(f"{start}the group {override.group} was removed")
    name = override.names[0]
    if override.sign == "~":
        if name not in group:
            raise ConfigError(start + collected.unknown_key(f"{override.group}.{name}"))
        del group[name]
        return
    if name not in group and override.sign == "":
        raise ConfigError(start + collected.unknown_key(f"{override.group}.{name}"))
    if name in group and override.sign == "+" and len(override.names) == 1:
        raise ConfigError(f"{start}{key} exists already: drop the +")
    if len(override.names) > 1:
        _set_below(group, override.names, override.value(), start + key)
    else:
        group[name] = override.value()


def _set_below(group: dict[str, Any], names: list[str], value: Any, start: str) -> None:
    """Set a key inside a mapping that is the value of a key. `start` begins the error message."""
    for name in names[:-1]:
        if group.get(name) is None:
            group[name] = {}
        group = group[name]
        if not isinstance(group, dict):
            raise ConfigError(f"{start}: {name} is {group!r}, which has no keys of its own")
    group[names[-1]] = value
