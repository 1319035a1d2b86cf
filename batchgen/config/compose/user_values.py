"""Collects the values that a user sets for a job, from a job file or mapping and from arguments.
`compose_config.py` merges them with the defaults."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from batchgen.config.compose.group_choices import inferred_choice
from batchgen.config.compose.overrides import Override, unknown_group, unknown_key
from batchgen.config.groups.config_keys import (
    EXPERIMENT,
    GROUPS,
    STEP_LISTS,
    all_keys,
    choices,
    nearest,
    nearest_key,
)
from batchgen.config.groups.convert_value import plain_value
from batchgen.util.errors import ConfigError

CHOICE = "choice"
"""The key in a group of a job file that names the group's choice."""


@dataclass
class UserValues:
    """A user's values for a job, before they are merged with the defaults.

    Attributes:
        folders: folders with more choices.
        locations: key → its file and line in the job file, for error messages.
        choices: group → its choice.
        experiments: the names of experiments.
        keys: full name of a key in the job file → its value.
        whole: groups that are a class of the user's (`_target_`), without a choice → their keys.
        steps: the lists of steps.
        typed: group → the keys that the command line sets in it, without keys below them → their
            text. `compose_groups` sets them from the arguments, after Hydra has composed the
            choices.
    """

    folders: Sequence[Path]
    locations: Mapping[str, str]
    choices: dict[str, str] = field(default_factory=dict)
    experiments: list[str] = field(default_factory=list)
    keys: dict[str, Any] = field(default_factory=dict)
    whole: dict[str, dict[str, Any]] = field(default_factory=dict)
    steps: dict[str, Any] = field(default_factory=dict)
    typed: dict[str, dict[str, str | None]] = field(default_factory=dict)

    def named(self, group: str) -> dict[str, Any]:
        """The keys that the user sets in a group, without keys below them → a value of each: from
        these `inferred_choice` infers the group's choice."""
        in_file = {
            key.split(".")[1]: value
            for key, value in self.keys.items()
            if key.startswith(f"{group}.")
        }
        return in_file | self.typed.get(group, {})

    def at(self, key: str) -> str:
        """The location of a key in the job file, as the beginning of a message."""
        return f"{self.locations.get(key, key)}: "

    def add_values(self, values: Mapping[str, Any]) -> None:
        """Add the values of a job file or mapping.

        Raises:
            ConfigError: a group, choice or key does not exist.
        """
        if not isinstance(values, Mapping):
            raise ConfigError(
                f"a job is a mapping of its keys, got {values!r}: a job file is read by "
                "yaml.safe_load(open('job.yaml')), or run by `batchgen job.yaml`"
            )
        for key, value in values.items():
            value = plain_value(value)
            group = key.partition(".")[0] if isinstance(key, str) else ""
            if key == EXPERIMENT:
                for name in value if isinstance(value, list) else [value]:
                    self.experiments.append(self._checked_choice(key, name, self.at(key)))
            elif group in STEP_LISTS:
                self._add_steps(str(key), value, self.at(str(key)))
            elif key == "defaults":
                raise ConfigError(
                    f"{self.at('defaults')}a job file names the choice of a group without a list "
                    "of defaults: `sampling: sample`, or with keys `sampling: {choice: sample, "
                    "n: 4}`"
                )
            elif group not in GROUPS:
                raise ConfigError(
                    self.at(str(key)) + unknown_group(group or repr(key), ("steps", "export"))
                )
            elif key != group:
                self._add_key(key, value)
            elif isinstance(value, dict):
                self._add_group(group, dict(value))
            elif value is not None:
                self.choices[group] = self._checked_choice(group, value, self.at(key))

    def _add_steps(self, key: str, value: Any, start: str) -> None:
        """Add a list of steps. `start` begins error messages, here and below."""
        if key not in STEP_LISTS:
            name = key.partition(".")[0]
            raise ConfigError(
                f"{start}{name} is a list of steps and has no keys: give the whole list, "
                f"{name}=[{{NAME: {{KEY: VALUE}}}}, …]"
            )
        self.steps[key] = value

    def _add_group(self, group: str, values: dict[str, Any]) -> None:
        """Add the keys of a group, which may have its choice among them, or be a class."""
        if CHOICE in values:
            choice = values.pop(CHOICE)
            self.choices[group] = self._checked_choice(group, choice, self.at(f"{group}.{CHOICE}"))
        elif values.get("_target_") is not None and inferred_choice(group, values) is None:
            # No choice has this class and these keys, so it is a class of the user's.
            self.whole[group] = values
            return
        for name, value in values.items():
            self._add_key(f"{group}.{name}", value)

    def _add_key(self, key: str, value: Any) -> None:
        """Add one key by its full name. Raises ConfigError if no choice has it."""
        if self._is_nowhere(key):
            raise ConfigError(self.at(key) + self.unknown_key(key))
        self.keys[key] = value

    def add_override(self, override: Override) -> None:
        """Add an argument of the command line.

        Raises:
            ConfigError: its group, choice or key does not exist.
        """
        group, start = override.group, f"{override.argument}: "
        if group in STEP_LISTS:
            self._add_steps(override.key, None if override.sign == "~" else override.value(), start)
            return
        if group not in (*GROUPS, EXPERIMENT):
            raise ConfigError(start + _unknown(override))
        if override.names:
            if override.sign == "":  # + may add a key that no choice has, and ~ takes one out
                key = f"{group}.{override.names[0]}"
                if self._is_nowhere(key):
                    raise ConfigError(start + self.unknown_key(key))
                self.typed.setdefault(group, {})[override.names[0]] = override.text
            return
        if override.sign == "~":  # `compose_groups` takes the group out
            return
        value = override.value()
        if group == EXPERIMENT:
            self.experiments.append(self._checked_choice(group, value, start))
            return
        self.choices[group] = self._checked_choice(group, value, start)
        # A choice on the command line replaces what the job file sets in its group.
        self.whole.pop(group, None)
        self.keys = {key: v for key, v in self.keys.items() if key.partition(".")[0] != group}

    def unknown_key(self, key: str) -> str:
        """The message, without its location, for a key that the job does not have."""
        choices_with_key = list(all_keys().get(key, ()))
        return unknown_key(key, self.choices.get(key.partition(".")[0]), choices_with_key)

    def _is_nowhere(self, key: str) -> bool:
        """Whether no choice has this key. This is checked before Hydra is loaded."""
        group, _, name = key.partition(".")
        known = f"{group}.{name.partition('.')[0]}" in all_keys()
        return not (known or self.folders or group in self.whole)

    def _checked_choice(self, group: str, choice: Any, start: str) -> str:
        """The choice of a group as text. Raises ConfigError if there is no such choice."""
        known = choices(group, self.folders)
        if isinstance(choice, dict):
            raise ConfigError(f"{start}give the keys of a group one by one: {group}.KEY=VALUE")
        if choice not in known:
            guess = nearest(choice, known) if isinstance(choice, str) else None
            raise ConfigError(
                f"{start}{group} has no choice {choice}: "
                + (f"did you mean {guess}? Its" if guess else "its")
                + f" choices are {', '.join(known)}"
            )
        return str(choice)


def _unknown(override: Override) -> str:
    """The message for an unknown group, which may also be a key without its group."""
    if not override.names:
        group, underscore, name = override.key.partition("_")
        if underscore and f"{group}.{name}" in all_keys():  # output_dir
            return f"there is no group {override.key}: did you mean {group}.{name}?"
        if guess := nearest_key(override.key):
            return f"there is no group {override.key}: did you mean {guess}?"
    return unknown_group(override.group)
