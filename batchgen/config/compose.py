"""Makes a job's configuration of what a user gives: a job file, a mapping, `key=value` texts.

Hydra composes the choices of the groups and the ready jobs; the keys are then set here, so that a
text stays as it was typed and a mistake is named in words of our own.
"""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from omegaconf import OmegaConf
from omegaconf.errors import OmegaConfBaseException

from batchgen.config.choices import inferred_choice
from batchgen.config.groups import JobConfig
from batchgen.config.keys import EXPERIMENT, GROUPS, all_keys, choices, nearest, nearest_key
from batchgen.config.load import load_config
from batchgen.config.overrides import Override, parse_override, unknown_group, unknown_key
from batchgen.errors import ConfigError

CHOICE = "choice"
"""The key of a group in a job file that says which of its choices is taken."""
_OF_OLD_FILES = ("hydra", "defaults")
"""What the config.yaml of older versions has besides groups."""


def compose(values: Mapping[str, Any], overrides: Sequence[str] = ()) -> JobConfig:
    """The configuration of one job.

    Args:
        values: the job as a job file has it. A key is a group with its choice ("model": "hf"), a
            group with its keys ("model": {"path": "…"}, and "choice": "hf" among them if need be),
            or one key with its full name ("sampling.n": 4). What is not given is as it is for the
            command without arguments.
        overrides: arguments `key=value` as on the command line; they go before `values`. A choice
            among them replaces all that `values` says of its group.

    Raises:
        ConfigError: a key or choice is unknown, or a value is missing, of a wrong type or out of
            range.
    """
    return checked(compose_groups(values, overrides).groups)


def checked(groups: dict[str, Any]) -> JobConfig:
    """The configuration that composed groups make.

    Raises:
        ConfigError: a value is missing, of a wrong type or out of range.
    """
    try:
        return load_config(OmegaConf.create(groups))
    except OmegaConfBaseException as error:
        raise ConfigError(
            f"{error.full_key or 'a value'} has ${{ and no reference behind it: ${{KEY}} takes the "
            "value of another key; write \\${ for the text"
        ) from None


@dataclass(frozen=True)
class Composed:
    """The groups of a job with all their keys, and the choice that each group began as.

    The values of the keys are not checked yet. A strategy of the user's own has no choice.
    """

    groups: dict[str, Any]
    choices: dict[str, str]


def compose_groups(
    values: Mapping[str, Any],
    overrides: Sequence[str] = (),
    *,
    folders: Sequence[Path] = (),
    places: Mapping[str, str] | None = None,
) -> Composed:
    """Put the choices and keys of a job together.

    Args:
        values: as of `compose`.
        overrides: as of `compose`.
        folders: folders of the user with further choices, laid out as conf/ is.
        places: key of `values` → where it stands in a job file, for error messages.

    Raises:
        ConfigError: a key or choice is unknown, or a text cannot be read.
    """
    given = _Given(folders, places or {})
    given.add_values(values)
    parsed = [parse_override(argument) for argument in overrides]
    for override in parsed:
        given.add_override(override)
    groups = _composed(given)
    for key, value in given.keys.items():
        _set(groups, given, key, value)
    for override in parsed:
        if override.names or override.sign == "~":
            _apply(groups, given, override)
    ordered = {name: groups[name] for name in [*GROUPS, *groups] if name in groups}
    return Composed(ordered, given.choices)


@dataclass
class _Given:
    """What a user has said, before it meets the defaults.

    Attributes:
        choices: group → its choice.
        experiments: the ready jobs to start from.
        keys: full name → value, from the job file.
        whole: groups that are taken as they are given, without a choice.
        named: group → the names of the keys that are given for it, on the command line too.
    """

    folders: Sequence[Path]
    places: Mapping[str, str]
    choices: dict[str, str] = field(default_factory=dict)
    experiments: list[str] = field(default_factory=list)
    keys: dict[str, Any] = field(default_factory=dict)
    whole: dict[str, dict[str, Any]] = field(default_factory=dict)
    named: dict[str, dict[str, Any]] = field(default_factory=dict)

    def at(self, key: str) -> str:
        """Where a key of the job file stands, as the beginning of a message."""
        return f"{self.places.get(key, key)}: "

    def add_values(self, values: Mapping[str, Any]) -> None:
        for key, value in values.items():
            value = _plain(value)
            group = key.partition(".")[0] if isinstance(key, str) else ""
            if key == EXPERIMENT:
                for name in value if isinstance(value, list) else [value]:
                    self.experiments.append(self._known(key, name, self.at(key)))
            elif group not in GROUPS:
                if key not in _OF_OLD_FILES:
                    raise ConfigError(self.at(str(key)) + unknown_group(group or repr(key)))
            elif key != group:
                self._add_key(key, value)
            elif isinstance(value, dict):
                self._add_group(group, dict(value))
            elif value is not None:
                self.choices[group] = self._known(group, value, self.at(key))

    def _add_group(self, group: str, values: dict[str, Any]) -> None:
        if CHOICE in values:
            choice = values.pop(CHOICE)
            self.choices[group] = self._known(group, choice, self.at(f"{group}.{CHOICE}"))
        elif "_target_" in values and inferred_choice(group, values) is None:
            self.whole[group] = values  # a strategy of the user's own
            return
        for name, value in values.items():
            self._add_key(f"{group}.{name}", value)

    def _add_key(self, key: str, value: Any) -> None:
        group, _, name = key.partition(".")
        if self._is_nowhere(key):
            raise ConfigError(self.at(key) + _unknown_key(self, key))
        self.keys[key] = value
        self.named.setdefault(group, {})[name.partition(".")[0]] = value

    def add_override(self, override: Override) -> None:
        group, start = override.group, f"{override.argument}: "
        if group not in (*GROUPS, EXPERIMENT):
            raise ConfigError(start + _unknown(override))
        if override.names:
            if override.sign == "":
                key = f"{group}.{override.names[0]}"
                if self._is_nowhere(key):
                    raise ConfigError(start + _unknown_key(self, key))
                self.named.setdefault(group, {})[override.names[0]] = override.text
            return
        if override.sign == "~":
            return
        value = override.value()
        if group == EXPERIMENT:
            self.experiments.append(self._known(group, value, start))
            return
        self.choices[group] = self._known(group, value, start)
        self.whole.pop(group, None)
        self.keys = {key: v for key, v in self.keys.items() if key.partition(".")[0] != group}

    def _is_nowhere(self, key: str) -> bool:
        """Whether no choice has a key. It can be told at once, before Hydra loads."""
        group, _, name = key.partition(".")
        known = f"{group}.{name.partition('.')[0]}" in all_keys()
        return not (known or self.folders or group in self.whole)

    def _known(self, group: str, choice: Any, start: str) -> str:
        known = choices(group, self.folders)
        if choice not in known:
            guess = nearest(choice, known) if isinstance(choice, str) else None
            raise ConfigError(
                f"{start}{group} has no choice {choice}: "
                + (f"did you mean {guess}? " if guess else "")
                + f"Its choices are {', '.join(known)}"
            )
        return str(choice)


def _unknown(override: Override) -> str:
    """The message for a group that is not there: it may have been left out of a key."""
    if not override.names:
        if guess := nearest_key(override.key):
            return f"there is no group {override.key}: did you mean {guess}?"
    return unknown_group(override.group)


def _composed(given: _Given) -> dict[str, Any]:
    """The groups with the choices that were made, or that follow from the keys that were given."""
    if not given.experiments:
        for group, named in given.named.items():
            if group not in given.choices and group not in given.whole:
                if (choice := inferred_choice(group, named)) is not None:
                    given.choices[group] = choice
    overrides = [f"{group}={choice}" for group, choice in given.choices.items()]
    overrides += [f"+{EXPERIMENT}={name}" for name in given.experiments[:1]]
    if len(given.experiments) > 1:
        raise ConfigError(f"experiment: choose one of {', '.join(given.experiments)}")
    if given.folders:
        paths = ",".join(f"'file://{folder.absolute()}'" for folder in given.folders)
        overrides.append(f"hydra.searchpath=[{paths}]")
    # Hydra takes a tenth of a second to load, and what was refused until here does not need it.
    from hydra import compose as compose_choices
    from hydra import initialize_config_module
    from hydra.core.global_hydra import GlobalHydra
    from hydra.errors import HydraException

    GlobalHydra.instance().clear()
    try:
        with initialize_config_module("batchgen.conf", version_base="1.3"):
            composed = compose_choices("config", overrides=overrides, return_hydra_config=True)
    except (HydraException, OmegaConfBaseException) as error:
        raise ConfigError(f"the choices {' '.join(overrides)} do not fit: {error}") from None
    made = composed.hydra.runtime.choices
    given.choices = {group: made[group] for group in GROUPS if group not in given.whole}
    names = [str(name) for name in composed if name != "hydra"]
    return {**{name: OmegaConf.to_container(composed[name]) for name in names}, **given.whole}


def _set(groups: dict[str, Any], given: _Given, key: str, value: Any) -> None:
    """Set a key of the job file."""
    group, _, name = key.partition(".")
    if name not in groups[group] and name.partition(".")[0] in groups[group]:
        _set_below(groups[group], name.split("."), value, given.at(key) + key)
        return
    if name not in groups[group]:
        raise ConfigError(given.at(key) + _unknown_key(given, key))
    groups[group][name] = value


def _apply(groups: dict[str, Any], given: _Given, override: Override) -> None:
    """Set, add or take away a key, as an argument says."""
    start, key = f"{override.argument}: ", override.key
    if override.sign == "~" and not override.names:
        groups.pop(key, None)
        return
    group = groups.get(override.group)
    if not isinstance(group, dict):
        raise ConfigError(f"{start}the group {override.group} was taken away")
    name = override.names[0]
    if override.sign == "~":
        if group.pop(name, start) is start:
            raise ConfigError(start + _unknown_key(given, f"{override.group}.{name}"))
        return
    if name not in group and override.sign == "":
        raise ConfigError(start + _unknown_key(given, f"{override.group}.{name}"))
    if name in group and override.sign == "+" and len(override.names) == 1:
        raise ConfigError(f"{start}{key} is there already: drop the +")
    if len(override.names) > 1:
        _set_below(group, override.names, override.value(), start + key)
    else:
        group[name] = override.value()


def _set_below(group: dict[str, Any], names: list[str], value: Any, start: str) -> None:
    """Set a key inside a mapping that is the value of a key."""
    for name in names[:-1]:
        if group.get(name) is None:
            group[name] = {}
        group = group[name]
        if not isinstance(group, dict):
            raise ConfigError(f"{start}: {name} is {group!r}, which has no keys of its own")
    group[names[-1]] = value


def _unknown_key(given: _Given, key: str) -> str:
    group = key.partition(".")[0]
    others = list(all_keys().get(key, ()))
    return unknown_key(key, given.choices.get(group), others)


def _plain(value: Any) -> Any:
    """A value from Python as YAML could have it: tuples are lists, and paths are texts."""
    if isinstance(value, Mapping):
        return {key: _plain(item) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [_plain(item) for item in value]
    return os.fspath(value) if isinstance(value, os.PathLike) else value
