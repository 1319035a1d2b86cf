"""The groups, choices and keys that exist, the types of their values, and suggestions for typos.

A *group* is a part of a job's configuration, such as `model`. Its *choices* are the files of
conf/GROUP/ (`model=hf`), each with keys and defaults (`model.path`).
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Sequence
from functools import cache
from importlib.resources import files
from pathlib import Path
from typing import Any, get_type_hints

from batchgen.config.groups.constraint_config import CONSTRAINT_KINDS
from batchgen.config.groups.convert_value import key_of
from batchgen.config.groups.job_config import (
    PROMPT_KINDS,
    DatasetConfig,
    EngineGroup,
    JobConfig,
    ModelGroup,
)
from batchgen.config.groups.named_code import named_code
from batchgen.config.groups.output_config import OutputConfig, ProgressConfig, ScoreConfig
from batchgen.config.groups.sampling_config import SamplingConfig
from batchgen.config.groups.workers_config import BudgetConfig, WorkersConfig
from batchgen.util.errors import ConfigError
from batchgen.util.text.plain_yaml import MOST_BYTES, load_yaml

STEP_LISTS = ("rows", "post")
"""The keys of a job that are not groups: each is a list of steps `{NAME: {KEY: VALUE}}`."""
PARTS = tuple(field.name for field in dataclasses.fields(JobConfig))
"""The groups and the lists of steps, in the order of a job file."""
GROUPS = tuple(name for name in PARTS if name not in STEP_LISTS)
EXPERIMENT = "experiment"
"""The group of experiments, each of which makes choices in all other groups."""

_DECLARED: dict[str, Sequence[type]] = {
    "model": [ModelGroup],
    "dataset": [DatasetConfig],
    "prompt": [*PROMPT_KINDS.values()],
    "sampling": [SamplingConfig],
    "constraint": [*CONSTRAINT_KINDS.values()],
    "engine": [EngineGroup],
    "workers": [WorkersConfig],
    "score": [ScoreConfig],
    "budget": [BudgetConfig],
    "output": [OutputConfig],
    "progress": [ProgressConfig],
}
"""The classes whose fields are the keys of a group. Options of strategies are not here, because
their classes load torch; conf/strategy/ has their names and defaults."""

# Keys of texts in which `\n` ends a line; see `has_escapes`.
_WITH_ESCAPES = {
    *("prompt.user", "prompt.system", "prompt.text", "prompt.messages"),
    "prompt.answer",
    *("dataset.delimiter", "sampling.stop", "constraint.start_after", "constraint.choices"),
}


@cache
def _conf(group: str) -> dict[str, str]:
    """Choice → the content of its file, for a group of batchgen's conf/."""
    folder = files("batchgen.conf").joinpath(group)
    configs = [file for file in folder.iterdir() if file.name.endswith(".yaml")]
    return {
        file.name.removesuffix(".yaml"): file.read_text(encoding="utf-8")
        for file in sorted(configs, key=lambda file: file.name)
    }


def choice_text(group: str, choice: str, folders: Sequence[Path] = ()) -> str:
    """The yaml text of a choice, from batchgen's conf/ or from one of the user's folders."""
    files = [file for folder in folders if (file := folder / group / f"{choice}.yaml").is_file()]
    if files and choice not in _conf(group):
        try:
            with files[0].open("rb") as source:
                return source.read(MOST_BYTES).decode()
        except (OSError, UnicodeDecodeError) as error:
            raise ConfigError(f"{files[0]} cannot be read: {error}") from None
    return _conf(group)[choice]


@cache
def choice_values(group: str, choice: str) -> dict[str, Any]:
    """The keys and defaults of a choice in batchgen's conf/."""
    values: dict[str, Any] = load_yaml(choice_text(group, choice), f"conf/{group}/{choice}.yaml")
    return values


def choices(group: str, folders: Sequence[Path] = ()) -> list[str]:
    """The choices of a group, including those in the user's folders."""
    in_folders = [
        file.stem for folder in folders for file in sorted((folder / group).glob("*.yaml"))
    ]
    return list(dict.fromkeys([*_conf(group), *in_folders]))


@cache
def default_choices() -> dict[str, str]:
    """The default choice of each group, from conf/config.yaml."""
    text = files("batchgen.conf").joinpath("config.yaml").read_text(encoding="utf-8")
    entries = load_yaml(text, "conf/config.yaml")["defaults"]
    return {
        group: choice
        for entry in entries
        if isinstance(entry, dict)
        for group, choice in entry.items()
        if group in GROUPS
    }


@cache
def declared_type(key: str) -> Any:
    """The declared type of `group.key`; Any if none is declared. An option of a strategy has the
    type of its default, unless that is null."""
    group, _, name = key.partition(".")
    declaring = _launchers() if group == "launcher" else _DECLARED.get(group, ())
    declared = [get_type_hints(cls) for cls in declaring]
    hints = [{key_of(field): hint for field, hint in types.items()}.get(name) for types in declared]
    if named_hints := [hint for hint in hints if hint is not None]:
        return named_hints[0]
    if group == "strategy":
        for choice in choices(group):
            if (default := choice_values(group, choice).get(name)) is not None:
                return type(default)
    return Any


def _launchers() -> list[type]:
    """The classes of launchers. Unlike those of strategies, they do not load torch."""
    targets = [choice_values("launcher", choice)["_target_"] for choice in choices("launcher")]
    return [named_code(target, "launcher._target_") for target in targets if target is not None]


def has_escapes(key: str) -> bool:
    r"""Whether `\n` ends a line in the value: in texts that the model reads or writes, and in the
    character that separates the cells of a file."""
    return key in _WITH_ESCAPES


@cache
def all_keys() -> dict[str, tuple[str, ...]]:
    """Every `group.key` of every choice → the choices of its group that have it."""
    keys: dict[str, tuple[str, ...]] = {}
    for group in GROUPS:
        for choice in choices(group):
            for name in choice_values(group, choice):
                key = f"{group}.{name}"
                keys[key] = (*keys.get(key, ()), choice)
    return keys


def nearest(word: str, names: Iterable[str]) -> str | None:
    """The name that was probably meant by a word: the one with the fewest typos, in at most a third
    of the letters; otherwise one that begins with the word or has all its parts, as max_new_tokens
    for max_tokens. None if no name is near."""
    words = list(names)
    distance, nearest_word = min(
        ((edit_distance(word, other), other) for other in words), default=(9, "")
    )
    if distance <= max(1, min(3, len(word) // 3)):
        return nearest_word
    parts = set(word.split("_"))
    like = (o for o in words if o.startswith(word) or parts <= set(o.split("_")))
    return next(like, None) if len(word) > 1 else None


def nearest_key(key: str) -> str | None:
    """The key of any group that was probably meant, even if its group is missing or wrong."""
    group, _, name = key.rpartition(".")
    names: dict[str, str] = {}
    for known in all_keys():
        names.setdefault(known.partition(".")[2], known)
    if group not in GROUPS:
        group = nearest(group, GROUPS) or ""
    keys = [known.partition(".")[2] for known in all_keys() if known.startswith(f"{group}.")]
    if near := nearest(name, keys):
        return f"{group}.{near}"
    elsewhere = nearest(name, names)
    return names[elsewhere] if elsewhere else None


def edit_distance(first: str, second: str) -> int:
    """The number of letters to add, drop, change or swap with their neighbours to turn one word
    into the other (optimal string alignment)."""
    before: list[int] = []
    above = list(range(len(second) + 1))
    for i, letter in enumerate(first):
        row = [i + 1]
        for j, other in enumerate(second):
            cost = min(above[j] + (letter != other), above[j + 1] + 1, row[j] + 1)
            if i and j and letter == second[j - 1] and other == first[i - 1]:
                cost = min(cost, before[j - 1] + 1)
            row.append(cost)
        before, above = above, row
    return above[-1]
