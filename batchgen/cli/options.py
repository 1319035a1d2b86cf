"""Sorts the arguments of the command line into options, a job file, and `key=value` arguments."""

from __future__ import annotations

import re
import sys
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

from batchgen.cli.verb_table import VERBS
from batchgen.util.errors import ConfigError
from batchgen.util.paths import short_user_path, user_path

FLAGS = {
    "--help": "this help; also --help GROUP, --help GROUP=CHOICE and --help KEY",
    "--version": "the versions of batchgen and of what it computes with",
    "--dry-run": "show the first prompts as the model will read them, and load no weights",
    "--multirun": "run a job for each value of a=1,2,3 (choice(…), range(…) and glob(…) too)",
    "--cfg": "--cfg job prints the job as a job file and runs nothing; with --resolve, checked; "
    "with --package GROUP, one group of it",
    "--resolve": "",
    "--package": "",
    "--config-dir": "--config-dir DIR: a folder with further choices, laid out as conf/ is",
    "--trust": "--trust PATH: run the code of others that a job file or --config-dir at PATH names",
    "--config-path": "",
    "--config-name": "",
    "--completion": "--completion bash, zsh or fish prints a script that completes keys",
    "--hydra-help": "about Hydra, with whose launchers and sweepers jobs run: hydra/launcher=…",
    "--info": "",
    "--experimental-rerun": "",
}
"""Option → what it does; empty for those that need no mention."""
_SHORT = {
    **{"-h": "--help", "-m": "--multirun", "-c": "--cfg", "-cd": "--config-dir"},
    **{"-p": "--package"},
    **{"-cp": "--config-path", "-cn": "--config-name", "-V": "--version"},
}
_WITH_VALUE = {
    **{"--cfg": "job", "--config-dir": "a folder", "--config-path": "a folder"},
    **{"--trust": "a job file, or a folder"},
    **{"--config-name": "a name", "--package": "a group", "--completion": "bash, zsh or fish"},
    **{"--info": "a subject", "--experimental-rerun": "a pickled configuration"},
}
_OF_HYDRA = re.compile(r"(\+\+|\+|~)?hydra[./@]")
"""The beginning of arguments that set something of Hydra itself."""
_SEARCHPATH = re.compile(r"\+{0,2}hydra\.searchpath=")
"""How Hydra's users name folders with further choices, which is what --config-dir does."""

_RUNNING = ("run", "start", "generate", "submit", "infer", "main")
"""Verbs of other programs for running a job, which needs no verb here."""


@dataclass
class Options:
    """A command line that runs a job or tells something about jobs, sorted: options by their long
    names, the values of those that have one, a job file, arguments `key=value`, and Hydra's own."""

    flags: set[str] = field(default_factory=set)
    values: dict[str, list[str]] = field(default_factory=dict)
    job_file: Path | None = None
    overrides: list[str] = field(default_factory=list)
    hydra: list[str] = field(default_factory=list)


def parse_options(arguments: Sequence[str]) -> Options:
    """Sort the arguments of the command line. Raises ConfigError for unknown options and two job
    files."""
    options = Options()
    rest = list(arguments)
    helps = bool({"--help", "-h"} & set(arguments))
    while rest:
        argument = rest.pop(0)
        if argument.startswith("-"):
            _take_option(options, argument, rest)
        elif _SEARCHPATH.match(argument):
            options.flags.add("--config-dir")
            options.values.setdefault("--config-dir", []).extend(_searched(argument))
        elif _OF_HYDRA.match(argument):
            options.hydra.append(argument)
        elif argument.count("{{") > argument.count("}}"):
            raise ConfigError(_split_by_shell(argument, rest))
        elif _is_job_file(argument, helps):
            if options.job_file is not None:
                raise ConfigError(
                    f"there are two job files, {options.job_file} and {argument}: give one, and "
                    "what differs as key=value"
                )
            options.job_file = short_user_path(argument, "the job file")
        else:
            _check_no_verb(argument, helps)
            options.overrides.append(argument)
    if options.flags & {"--config-path", "--config-name"}:
        if options.job_file is not None:
            raise ConfigError(
                f"{options.job_file} is a job file: leave out --config-path and --config-name"
            )
        options.job_file = _named_file(options)
    return options


def _searched(argument: str) -> list[str]:
    """The folders that hydra.searchpath lists, as paths."""
    from batchgen.config.groups.read_value import Unreadable, read_value

    try:
        names = read_value(argument.partition("=")[2], list[str]) or []
    except Unreadable as error:
        raise ConfigError(f"{argument} cannot be read: {error}") from None
    for name in names:
        if "://" in name and not name.startswith("file://"):
            raise ConfigError(f"{argument}: further choices are read from folders: file:///FOLDER")
    return [name.removeprefix("file://") for name in names]


def _named_file(options: Options) -> Path:
    """The job file that Hydra's --config-path and --config-name stand for: it lies in that folder,
    or without one in a folder of --config-dir."""
    name = options.values.get("--config-name", ["config"])[-1].removesuffix(".yaml") + ".yaml"
    if folders := options.values.get("--config-path"):
        return short_user_path(folders[-1], "--config-path") / name
    folders = options.values.get("--config-dir", [])
    files = [short_user_path(folder, "--config-dir") / name for folder in folders]
    if file := next((file for file in files if file.is_file()), None):
        return file
    where = f"there is none in {' or '.join(folders)}" if folders else "its folder is not named"
    raise ConfigError(
        f"--config-name: {name} is a job file, and {where}: run it as `batchgen FOLDER/{name}`, or "
        "add --config-path FOLDER"
    )


def asks_hydra(options: Options) -> bool:
    """Whether Hydra itself has to answer: to run a job its way, or to tell something of itself. A
    dry run and `--cfg job` show what a job is, which no launcher changes."""
    if options.values.get("--cfg", ["job"])[-1] in ("hydra", "all"):
        return True
    if options.flags & {"--hydra-help", "--info", "--experimental-rerun"}:
        return True
    return bool(options.hydra) and not options.flags & {"--cfg", "--dry-run"}


def warn_of_repeats(options: Options) -> None:
    """Say on stderr which of several values of a key holds."""
    last: dict[str, str] = {}
    for argument in options.overrides:
        key = argument.partition("=")[0].lstrip("+")
        if (before := last.get(key, argument)) != argument:
            print(f"batchgen: warning: {before} is overridden by {argument}", file=sys.stderr)
        last[key] = argument


def choice_folders(options: Options) -> list[Path]:
    """The folders of the user with further choices. Raises ConfigError if one is not there."""
    folders = [user_path(name, "--config-dir") for name in options.values.get("--config-dir", [])]
    for folder in folders:
        if not folder.is_dir():
            raise ConfigError(f"--config-dir {folder}: there is no such folder")
    return folders


def _take_option(options: Options, argument: str, rest: list[str]) -> None:
    name, equals, value = argument.partition("=")
    name = _SHORT.get(name, name)
    if name not in FLAGS:
        raise ConfigError(_no_option(argument))
    if name in _WITH_VALUE:
        if not equals:
            if name == "--info" and not (rest and rest[0].replace("-", "").isalpha()):
                rest.insert(0, "all")
            if not rest:
                raise ConfigError(f"{argument} needs a value: {_WITH_VALUE[name]}")
            value = rest.pop(0)
        options.values.setdefault(name, []).append(value)
    elif equals:
        raise ConfigError(f"{argument}: {name} takes no value")
    options.flags.add(name)


def _split_by_shell(argument: str, rest: Sequence[str]) -> str:
    """What to say of a template that came without quotes, in several words."""
    words = [argument]
    for word in rest:
        words.append(word)
        if "}}" in word:
            break
    typed = " ".join(words)
    return f"{argument} ends inside a template, because the shell splits at spaces: write '{typed}'"


def _no_option(argument: str) -> str:
    name = argument.lstrip("-")
    if "." in name:
        return f"{argument} is not an option: keys are written without dashes: {name}"
    from batchgen.config.groups.config_keys import nearest, nearest_key

    if guess := nearest(argument, FLAGS):
        return f"{argument} is not an option: did you mean {guess}?"
    word, equals, value = name.partition("=")
    key = nearest_key(word.replace("-", "_")) if len(word) > 2 else None
    if key is None:
        return f"{argument} is not an option: `batchgen --help` lists them"
    return f"{argument} is not an option: did you mean {key}={value if equals else '…'}?"


def _check_no_verb(argument: str, helps: bool) -> None:
    """Raise ConfigError for a verb that is misspelt, or does not come first."""
    if helps or not argument.isalpha():
        return
    if argument in _RUNNING:
        raise ConfigError(
            f"{argument} is not a verb: a job runs without one: `batchgen job.yaml`, or "
            "`batchgen model.path=… dataset.path=…`"
        )
    from batchgen.config.groups.config_keys import nearest

    if argument in VERBS:
        raise ConfigError(f"{argument} is a verb, which comes first: batchgen {argument} …")
    if guess := nearest(argument, VERBS):
        raise ConfigError(f"there is no verb {argument}: did you mean batchgen {guess}?")


def _is_job_file(argument: str, helps: bool) -> bool:
    """Whether an argument names a file or folder: keys have no slash and do not end in .yaml. With
    `--help` a word is a group or a key."""
    if "=" in argument or argument.startswith("+"):
        return False
    if argument.endswith((".yaml", ".yml")) or "/" in argument:
        return True
    return not helps and Path(argument).is_dir()
