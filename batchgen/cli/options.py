"""Sorts the arguments of the command line into options, a job file, `key=value` arguments, and
Hydra's own arguments. `parse_options` is the entry point."""

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
"""Each option's help text; empty if the help does not list the option."""
# Short option → long option.
_SHORT = {
    **{"-h": "--help", "-m": "--multirun", "-c": "--cfg", "-cd": "--config-dir"},
    **{"-p": "--package"},
    **{"-cp": "--config-path", "-cn": "--config-name", "-V": "--version"},
}
# Options with a value → what the value is, for messages.
_WITH_VALUE = {
    **{"--cfg": "job", "--config-dir": "a folder", "--config-path": "a folder"},
    **{"--trust": "a job file, or a folder"},
    **{"--config-name": "a name", "--package": "a group", "--completion": "bash, zsh or fish"},
    **{"--info": "a subject", "--experimental-rerun": "a pickled configuration"},
}
_OF_HYDRA = re.compile(r"(\+\+|\+|~)?hydra[./@]")
"""The beginning of an argument that configures Hydra itself."""
_SEARCHPATH = re.compile(r"\+{0,2}hydra\.searchpath=")
"""Hydra's way to name folders with further choices, which is treated as `--config-dir`."""

_RUNNING = ("run", "start", "generate", "submit", "infer", "main")
"""The verbs that other programs use to run a job. batchgen runs a job without a verb."""


@dataclass
class Options:
    """A command line without a verb, sorted.

    Attributes:
        flags: the options, by their long names.
        values: the values of options that have any, by the long names.
        job_file: the job file or pipeline file; None without one.
        overrides: the arguments `key=value`.
        hydra: the arguments that configure Hydra itself.
    """

    flags: set[str] = field(default_factory=set)
    values: dict[str, list[str]] = field(default_factory=dict)
    job_file: Path | None = None
    overrides: list[str] = field(default_factory=list)
    hydra: list[str] = field(default_factory=list)


def parse_options(arguments: Sequence[str]) -> Options:
    """Sort the arguments of the command line.

    Raises:
        ConfigError: an option is unknown, there are two job files, or an argument is a verb, or
            looks like one.
    """
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
    """Return the folders that `hydra.searchpath=` lists, as paths."""
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
    """Return the job file that Hydra's --config-path and --config-name stand for. It is in that
    folder, or without --config-path in a folder of --config-dir."""
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
    """Whether Hydra must handle the command line: to run jobs with its launchers, or to describe
    itself. A dry run and `--cfg job` only show a job, so they do not need Hydra."""
    if options.values.get("--cfg", ["job"])[-1] in ("hydra", "all"):
        return True
    if options.flags & {"--hydra-help", "--info", "--experimental-rerun"}:
        return True
    return bool(options.hydra) and not options.flags & {"--cfg", "--dry-run"}


def warn_of_repeats(options: Options) -> None:
    """Warn on stderr if a later argument overrides an earlier one of the same key."""
    last: dict[str, str] = {}
    for argument in options.overrides:
        key = argument.partition("=")[0].lstrip("+")
        if (before := last.get(key, argument)) != argument:
            print(f"batchgen: warning: {before} is overridden by {argument}", file=sys.stderr)
        last[key] = argument


def choice_folders(options: Options) -> list[Path]:
    """Return the user's folders with further choices. Raises ConfigError if a folder does not
    exist."""
    folders = [user_path(name, "--config-dir") for name in options.values.get("--config-dir", [])]
    for folder in folders:
        if not folder.is_dir():
            raise ConfigError(f"--config-dir {folder}: there is no such folder")
    return folders


def _take_option(options: Options, argument: str, rest: list[str]) -> None:
    """Add one option to `options`. Its value may be the first of the arguments `rest`, and is
    removed there."""
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
    """Return the error message for a template that the shell has split into several words, because
    it was not quoted."""
    words = [argument]
    for word in rest:
        words.append(word)
        if "}}" in word:
            break
    typed = " ".join(words)
    return f"{argument} ends inside a template, because the shell splits at spaces: write '{typed}'"


def _no_option(argument: str) -> str:
    """Return the error message for an unknown option."""
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
    """Raise ConfigError for a word that is a misspelt verb, or a verb that is not the first
    argument."""
    if helps or not argument.isalpha():
        return
    if argument == "help":
        raise ConfigError("help is not a verb: `batchgen --help` lists verbs, groups and options")
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
    """Whether an argument names a file or folder. Keys have no slash and do not end in .yaml. With
    `--help` a plain word is a group or a key."""
    if "=" in argument or argument.startswith("+"):
        return False
    if argument.endswith((".yaml", ".yml")) or "/" in argument:
        return True
    return not helps and Path(argument).is_dir()
