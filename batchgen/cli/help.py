"""Writes the texts of `batchgen --help`: an overview, or an explanation of one group, choice, key
or list of steps. `help_text` is the entry point."""

from __future__ import annotations

import textwrap
from collections.abc import Sequence
from pathlib import Path

from batchgen.cli.conf_files import Entry, read_choice
from batchgen.cli.options import FLAGS
from batchgen.cli.step_help import steps_help
from batchgen.cli.verb_table import VERBS
from batchgen.config.groups.class_names import CLASSES
from batchgen.config.groups.config_keys import (
    EXPERIMENT,
    GROUPS,
    STEP_LISTS,
    all_keys,
    choices,
    default_choices,
    nearest,
    nearest_key,
)
from batchgen.pipelines.run.pipeline_values import PIPELINE
from batchgen.util.errors import ConfigError

# The most characters of a line.
_WIDTH = 100
_GROUPS = (*GROUPS, EXPERIMENT, PIPELINE)
_USAGE = """\
batchgen runs a data set through a language model and writes every token to Parquet.

    batchgen [JOB.yaml] [GROUP=CHOICE …] [KEY=VALUE …] [OPTION …]
    batchgen PIPELINE.yaml [KEY=VALUE …] [STEP.KEY=VALUE …] [OPTION …]
    batchgen VERB …

    batchgen model.path=Qwen/Qwen3-0.6B dataset.path=rows.jsonl 'prompt.user={{ question }}' \\
        output.dir=out

The same command resumes a job that was stopped. Without arguments it runs a demo."""
# What the overview says about values.
_VALUES = r"""
Text is taken as it is typed, so one level of quotes for the shell is enough:
    'prompt.user={{ question }} (a, b=c)?'     output.dir=runs/lr=0.1     'constraint.pattern=\d+'
In prompts, stop strings and choices \n is a line break and \\ a backslash. Text in double quotes
has the escapes \n \t \r \" \\ \uXXXX \xXX everywhere; single quotes refuse them.
A list is written [a,"b, c"] or a,b; a mapping {key: value}; null is no value; ${KEY} stands for
another key's value (\${ is plain text). +KEY=VALUE adds a key, ~KEY removes one.
A choice can be left out where its keys imply it: model.path=… means model=hf."""
_COMMON = (
    *("model.path", "dataset.path", "dataset.limit", "dataset.id_column", "prompt.user"),
    *("prompt.system", "sampling.temperature", "sampling.max_new_tokens", "sampling.n"),
    *("sampling.stop", "output.dir", "output.columns"),
)
"""The keys that the overview explains."""


def help_text(about: Sequence[str], folders: Sequence[Path] = ()) -> str:
    """Return the text of --help.

    Args:
        about: the words to explain: a group, a choice (GROUP=CHOICE), a key or a list of steps.
            Without words, the text is an overview.
        folders: the user's folders with further choices.

    Raises:
        ConfigError: there is nothing of that name.
    """
    return "\n\n".join(_about(w, folders) for w in about) if about else _overview(folders)


def _overview(folders: Sequence[Path]) -> str:
    """Return the help without words: usage, verbs, groups, lists of steps, common keys and
    options."""
    parts = [_USAGE]
    rows = [(f"{name} {verb.arguments}", verb.help) for name, verb in VERBS.items()]
    parts.append(_table("Verbs (batchgen VERB --help)", rows))
    rows = [(group, ", ".join(_default_first(group, folders))) for group in _GROUPS]
    title = "Groups and their choices, the default first (batchgen --help GROUP)"
    parts.append(_table(title, rows))
    rows = [(name, ", ".join(CLASSES[name])) for name in STEP_LISTS]
    parts.append(_table("Lists of steps (batchgen --help rows, --help post)", rows))
    rows = [(key, _sentence(_entry(key))) for key in _COMMON]
    parts.append(_table("Some keys (batchgen --help KEY; a group's help has all of its)", rows))
    parts.append("Values" + _VALUES)
    parts.append(_table("Options", [(flag, text) for flag, text in FLAGS.items() if text]))
    return "\n\n".join(parts)


def _about(word: str, folders: Sequence[Path]) -> str:
    """Return the help on one word. Raises ConfigError for an unknown word."""
    word = word.lstrip("+")  # as +experiment=NAME is typed
    group, equals, choice = word.partition("=")
    if word in _GROUPS:
        return _group_help(word, folders)
    if word in STEP_LISTS:
        return steps_help(word)
    if equals and group in _GROUPS:
        if choice not in choices(group, folders):
            names = ", ".join(choices(group, folders))
            raise ConfigError(f"{word}: {group} has no choice {choice}: choose among {names}")
        return _choice_help(group, choice, folders)
    if word in all_keys():
        return "\n".join(_entry_lines(_entry(word), word))
    guess = nearest(word, (*GROUPS, *STEP_LISTS)) or nearest_key(word)
    raise ConfigError(
        f"--help {word}: there is no such group or key: "
        + (f"did you mean {guess}?" if guess else f"groups are {', '.join(GROUPS)}")
    )


def _group_help(group: str, folders: Sequence[Path]) -> str:
    """Return the help on a group: all its choices. A key that an earlier choice explains in the
    same words is only named."""
    explained: list[Entry] = []
    texts = []
    for name in _default_first(group, folders):
        texts.append(_choice_help(group, name, folders, explained))
        explained += read_choice(group, name, folders).entries
    return "\n\n".join(texts)


def _choice_help(
    group: str, name: str, folders: Sequence[Path], explained: Sequence[Entry] = ()
) -> str:
    """Return what a choice is for, and its keys. Keys in `explained` are only named."""
    choice = read_choice(group, name, folders)
    default = default_choices().get(group) == name
    lines = [f"{group}={name}{' (the default)' if default else ''}"]
    lines += [f"    {line}" for line in choice.about]
    if group in (EXPERIMENT, PIPELINE):
        lines += [f"  {line}" for entry in choice.entries for line in entry.lines]
        return "\n".join(lines)
    for entry in choice.entries:
        if entry not in explained:
            is_key = entry.name != "defaults"  # `defaults` is Hydra's list of choices
            lines += _entry_lines(entry, f"{group}.{entry.name}" if is_key else entry.name)
    if repeated := [entry.name for entry in choice.entries if entry in explained]:
        as_above = f"  as above: {', '.join(repeated)}"
        lines += textwrap.wrap(as_above, _WIDTH, subsequent_indent="    ")
    return "\n".join(lines)


def _entry_lines(entry: Entry, name: str) -> list[str]:
    """Return the lines that explain one key."""
    first = f"  {name}: {entry.value}".rstrip()
    return [*first.split("\n"), *(f"    {line}".rstrip() for line in entry.comment)]


def _entry(key: str) -> Entry:
    """Return a key with the explanation of its group's default choice, or of the first choice that
    has the key."""
    group, _, name = key.partition(".")
    with_key = all_keys()[key]
    choice = next((c for c in _default_first(group) if c in with_key and c != "demo"), with_key[0])
    if key == "model.path":  # the default model has a fixed path, with another comment
        choice = "hf"
    return next(entry for entry in read_choice(group, choice).entries if entry.name == name)


def _default_first(group: str, folders: Sequence[Path] = ()) -> list[str]:
    """Return the names of a group's choices, the default first."""
    default = default_choices().get(group)
    return sorted(choices(group, folders), key=lambda name: name != default)


def _sentence(entry: Entry) -> str:
    """Return the first sentence of the comment on a key, in one line."""
    text = " ".join(entry.comment)
    end = text.find(". ")
    return textwrap.shorten(text if end < 0 else text[:end], _WIDTH - 28, placeholder=" …")


def _table(title: str, rows: Sequence[tuple[str, str]]) -> str:
    """Return a title and rows of a name and a text, as lines of at most `_WIDTH` characters."""
    width = max(len(name) for name, _ in rows) + 2
    lines = [f"{title}:"]
    for name, text in rows:
        lines += textwrap.wrap(
            f"  {name:<{width}}{text}", _WIDTH, subsequent_indent=" " * (width + 2),
            break_on_hyphens=False,
        )  # fmt: skip
    return "\n".join(lines)
