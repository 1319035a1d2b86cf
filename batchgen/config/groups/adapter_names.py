"""The names of LoRA adapters in a configuration, and which of them the rows of a job use.

["a/math", "user/lora@v2"]  →  {"math": "a/math", "lora": "user/lora@v2"}
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from pathlib import PurePath
from typing import Literal

from batchgen.engine.sampling.sampling_params import BASE
from batchgen.util.errors import ConfigError

ADAPTER = "adapter"
"""The column with a row's adapter, in a job that runs each row with each adapter."""

LoRA = str | Sequence[str] | Mapping[str, str] | None
"""Adapters as users name them: a path, several paths, or name → path. A path is a folder or a hub
name, which may end with @REVISION; `base` is the model without an adapter."""


HUB_NAME = re.compile(r"(\w[\w.-]*/\w[\w.-]*)(?:@(\S+))?")
"""OWNER/NAME or OWNER/NAME@REVISION: groups 1 and 2 are repository and revision. A folder may have
the same form."""

LoRATemplate = Literal["base", "adapter"]
"""The source of a job's tokenizer and chat template."""


def named_places(adapters: LoRA) -> dict[str, str]:
    """The paths of adapters by their names. An adapter without a name gets the last part of its
    path. `base` is included if the user names it.

    Raises:
        ConfigError: a name occurs twice or is invalid.
    """
    if adapters is None:
        return {}
    if isinstance(adapters, Mapping):
        pairs = list(adapters.items())
    else:
        locations = [adapters] if isinstance(adapters, str) else adapters
        pairs = [(_last_part(path), path) for path in locations]
    paths: dict[str, str] = {}
    for name, path in pairs:
        if name in paths:
            raise ConfigError(
                f"lora has two adapters named {name} ({paths[name]} and {path}): name them, as in "
                "{first: PATH, second: PATH}"
            )
        if re.fullmatch(r"[\w.+:-]+", name) is None:
            raise ConfigError(
                f"lora: an adapter's name has letters, digits, _, ., +, : and -, got {name!r}: "
                "name it, as in {name: PATH}"
            )
        if (name == BASE) != (path == BASE):
            raise ConfigError(
                f"lora: {BASE} is the model without an adapter, so no adapter can have that "
                f"name; got {name}: {path}"
            )
        paths[name] = path
    return paths


def _last_part(path: str) -> str:
    """The last part of a path without its revision, which may contain slashes (`refs/pr/1`)."""
    on_hub = HUB_NAME.fullmatch(path)
    name = PurePath(path if on_hub is None else on_hub[1]).name
    return name.partition("@")[0] or name


def only_one(adapters: LoRA) -> bool:
    """Whether there is exactly one adapter. All rows have it, unless a column chooses between it
    and `base`."""
    names = list(named_places(adapters))
    return len(names) == 1 and names != [BASE]


def check_choice(adapters: LoRA, column: str | None, grid: bool) -> None:
    """Check that the group `model` decides which adapter each row has.

    Raises:
        ConfigError: it does not, or in two ways.
    """
    names = list(named_places(adapters))
    if not names:
        key = "lora_grid" if grid else "lora_column"
        if grid or column is not None:
            raise ConfigError(
                f"model.{key} chooses among adapters, but model.lora names none: give "
                "model.lora=PATH, or a list of several"
            )
        return
    if grid and column is not None:
        raise ConfigError(
            "model.lora_grid runs each row with each adapter, and model.lora_column names one "
            "adapter per row: choose one of the two"
        )
    if names == [BASE]:
        raise ConfigError("model.lora is base, the model without an adapter: leave it out")
    if len(names) > 1 and not grid and column is None:
        raise ConfigError(
            f"model.lora has {len(names)} adapters ({', '.join(names)}): choose one per row with "
            "model.lora_column=COLUMN, or run each row with each of them with "
            "model.lora_grid=true"
        )
