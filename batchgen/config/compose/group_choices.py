"""Infers the choice of a group from the keys that the user sets in it: `model.path=m` means
`model=hf`. `compose_config.py` and `user_values.py` use `inferred_choice`."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from batchgen.config.groups.class_names import class_short_name
from batchgen.config.groups.config_keys import choice_values, choices, default_choices
from batchgen.util.errors import ConfigError

_IDENTIFYING = ("kind", "_target_")
"""Keys whose value identifies a choice."""
_BY_KEY = {
    ("model", "path"): "hf",
    ("dataset", "path"): "files",
    ("prompt", "messages"): "messages",
    ("prompt", "messages_column"): "messages",
    ("launcher", "workers"): "local",
    ("launcher", "restarts"): "local",
}
"""The choice for a key that several choices have, if the default choice lacks it."""


def inferred_choice(group: str, values: Mapping[str, Any]) -> str | None:
    """The choice of a group that has all keys of `values`, which lack the group's name. None: the
    default choice has them, or no choice has them.

    A model with a path is model=hf, a data set with a path is dataset=files, messages_column is
    prompt=messages, and launcher.workers is launcher=local. Otherwise it is the default choice if
    that has the keys, and else the only choice that has them.

    Raises:
        ConfigError: several choices have the keys.
    """
    fitting = [choice for choice in choices(group) if _fits(choice_values(group, choice), values)]
    for name, value in values.items():
        choice = _BY_KEY.get((group, name))
        # With a template of the user's message (`user`) it is prompt=chat, the default, which
        # refuses two sources of messages.
        if choice in fitting and value is not None and "user" not in values:
            return choice
    if not fitting or default_choices()[group] in fitting:
        return None
    if len(fitting) > 1 and not any(name in values for name in _IDENTIFYING):
        raise ConfigError(
            f"{group}: {', '.join(values)} may belong to {', '.join(fitting)}: add {group}=…"
        )
    return fitting[0]


def _fits(values: Mapping[str, Any], options: Mapping[str, Any]) -> bool:
    """Whether a choice with these keys and values can have the `options`."""
    fixed = {name: options[name] for name in _IDENTIFYING if name in options}
    if isinstance(target := fixed.get("_target_"), str):
        fixed["_target_"] = class_short_name(target)
    same = all(values.get(name) == value for name, value in fixed.items())
    return same and options.keys() <= values.keys()
