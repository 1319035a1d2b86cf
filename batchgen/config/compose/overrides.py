"""Parses the arguments `key=value` of the command line, and explains wrong ones.

`+model.x=1`  →  Override("+model.x=1", sign="+", key="model.x", text="1")
"""

from __future__ import annotations

import re
import shlex
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, get_args

from batchgen.config.groups.config_keys import (
    GROUPS,
    declared_type,
    has_escapes,
    nearest,
    nearest_key,
)
from batchgen.config.groups.read_value import UnclearEscape, Unreadable, read_value
from batchgen.util.errors import ConfigError

WORKER = "worker"
"""The short key of `workers.name`, as in `+worker=3`. It is not a group."""
_WORKER_NAME = "workers.name"
# Groups: the sign, the key, and the text after `=`.
_ARGUMENT = re.compile(r"(\+\+|\+|~|)([\w./@-]+)(?:=(.*))?", re.DOTALL)
_BARE_STEP = re.compile(r"\s*\[\s*(\w+):\s*\{")
"""A list whose first step lacks the braces around its name and options."""


def names_worker(argument: str) -> bool:
    """Whether an argument only names this process among the workers, which does not change the
    job."""
    return argument.partition("=")[0].lstrip("+") in (WORKER, _WORKER_NAME)


@dataclass(frozen=True)
class Override:
    """One argument of the command line.

    Attributes:
        argument: the argument as it was typed.
        sign: empty sets an existing key, `+` adds a new one, `++` does either, `~` removes a key.
        key: the key with its group.
        text: the text after the `=`; None without one.
    """

    argument: str
    sign: str
    key: str
    text: str | None

    @property
    def group(self) -> str:
        return self.key.partition(".")[0]

    @property
    def names(self) -> list[str]:
        """The parts of the key after its group."""
        return self.key.split(".")[1:]

    def value(self) -> Any:
        """The value of the text, by the type of the key.

        Raises:
            ConfigError: the text is not such a value; the message says how to type it.
        """
        assert self.text is not None
        key = ".".join([self.group, *self.names[:1]])
        hint = Any if len(self.names) > 1 else declared_type(key)
        try:
            value = read_value(self.text, hint, escapes=has_escapes(key))
        except UnclearEscape as error:
            raise ConfigError(f"{self.argument}: {error}: {self._clear_forms()}") from None
        except Unreadable as error:
            bare = _BARE_STEP.match(self.text)
            braces = f"; each step needs braces around it: [{{{bare[1]}: …}}]" if bare else ""
            raise ConfigError(f"{self.argument} cannot be read: {error}{braces}") from None
        numeric = {int, float} & {hint, *get_args(hint)}
        if numeric and isinstance(value, str) and "," in value:
            raise ConfigError(
                f"{self.argument}: a job has one value of {self.key}: add --multirun to run a job "
                "for each value (the decimal sign is a point)"
            )
        return value

    def _clear_forms(self) -> str:
        """How to type a text with an escape that is ambiguous."""
        assert self.text is not None
        if self.text.lstrip().startswith("["):
            return "put the text into double quotes for the former, and write \\\\ for the latter"
        start = f"{self.sign}{self.key}="
        quoted = self.text.replace('"', '\\"')
        former = shlex.quote(f'{start}"{quoted}"')
        latter = shlex.quote(start + self.text.replace("\\", "\\\\"))
        return f"type {former} for the former, or {latter} for the latter"


def parse_override(argument: str) -> Override:
    """Split an argument into its parts.

    Raises:
        ConfigError: it does not have the form key=value or ~key.
    """
    match = _ARGUMENT.fullmatch(argument)
    if match is None or (match[3] is None and match[1] != "~"):
        raise ConfigError(_no_override(argument))
    sign, key, text = match.groups()
    if key == WORKER:
        sign, key = "", _WORKER_NAME
    if re.match(r"hydra\b", key):
        raise ConfigError(
            f"{argument}: keys of Hydra itself are for the command line only: output.dir says "
            "where a job goes"
        )
    return Override(argument, sign, key, text)


def _no_override(argument: str) -> str:
    """The message for an argument without a key or without a value."""
    word = argument.partition("=")[0]
    if "=" in argument:
        return f"{argument}: {word!r} is not a key: arguments are key=value, such as sampling.n=4"
    hint = "arguments are key=value, such as sampling.n=4, or a job file before all others"
    if word in GROUPS or (near := nearest_key(word)) is None:
        example = f"{word}=… or {word}.KEY=…" if word in GROUPS else None
    else:
        example = f"{near}=…"
    return f"{argument} has no value: {hint}" + (f"; did you mean {example}?" if example else "")


def unknown_group(group: str, others: Sequence[str] = ()) -> str:
    """The message, without the location, for a group that does not exist. `others` are further
    names that may have been meant."""
    guess = nearest(group, [*GROUPS, "experiment", *others])
    return f"there is no group {group}: " + (
        f"did you mean {guess}?" if guess else f"choose among {', '.join(GROUPS)}"
    )


def unknown_key(key: str, choice: str | None, others: list[str]) -> str:
    """The message, without the location, for a key that its group lacks. `others` are the choices
    that have it."""
    group, _, name = key.partition(".")
    owner = f"{group}={choice}" if choice else group
    if others:
        with_key = ", ".join(f"{group}={other}" for other in others)
        return f"{owner} has no key {name}: it comes with {with_key}"
    guess = nearest_key(key)
    return f"{owner} has no key {name}: " + (
        f"did you mean {guess}?" if guess else f"`batchgen --help {group}` lists its keys"
    )
