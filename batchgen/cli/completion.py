"""Writes the script of `batchgen --completion bash`, which makes TAB complete groups, choices, keys
(also those of a pipeline's steps) and the options of verbs.

All words are written into the script, so that completion starts no process.
"""

from __future__ import annotations

import re
import shlex
from importlib.util import find_spec
from pathlib import Path
from typing import Literal, get_args, get_origin

from batchgen.cli.options import FLAGS
from batchgen.cli.verb_table import VERBS
from batchgen.config.groups.config_keys import EXPERIMENT, GROUPS, all_keys, choices, declared_type
from batchgen.pipelines.run.pipeline_values import PIPELINE
from batchgen.util.errors import ConfigError

# The scripts. Words in one pair of braces are filled in by `completion_script`.
_BASH = """\
# batchgen: eval "$(batchgen --completion {shell})" in the start file of your shell
{first}_batchgen() {{
    local line=${{COMP_LINE:0:COMP_POINT}} words={words}
    local current=${{line##*[[:space:]]}}
    local value=${{current#*=}}
    case ${{COMP_WORDS[1]}} in
{verbs}
    esac
    COMPREPLY=($(compgen -W "$words" -- "$current"))
    if [[ ${{#COMPREPLY[@]}} == 0 && $current == [A-Za-z]*.* ]]; then  # STEP.KEY of a pipeline
        COMPREPLY=($(compgen -P "${{current%%.*}}." -W "$words" -- "${{current#*.}}"))
    fi
    if [[ $current == *=* ]]; then
        # bash takes the = for the end of a word: what stands before it is not part of the answer.
        COMPREPLY=("${{COMPREPLY[@]#${{current%%=*}}=}}")
        [[ ${{#COMPREPLY[@]}} == 0 ]] && COMPREPLY=($(compgen -f -- "$value"))
    elif [[ ${{#COMPREPLY[@]}} == 0 ]]; then
        COMPREPLY=($(compgen -f -- "$current"))
    fi
}}
complete -o nospace -F _batchgen batchgen
"""
_DEFAULTS = "defaults"
"""The key of a choice that lists the choices it is composed of. It is not completed."""
_ZSH = "autoload -U +X bashcompinit && bashcompinit\n"
_FISH = """\
# batchgen: batchgen --completion fish | source
complete -c batchgen -a {words}
{verbs}
"""
_OPTION = re.compile(r"(?<![\w-])--[a-z][a-z-]*")
"""A long option in the text of a verb's module."""


def completion_script(shell: str) -> str:
    """Return the script for a shell. Raises ConfigError unless it is bash, zsh or fish."""
    words = shlex.quote(" ".join(_words()))
    if shell == "fish":
        line = "complete -c batchgen -n '__fish_seen_subcommand_from {}' -a {}"
        verb_lines = [
            line.format(verb, shlex.quote(options)) for verb, options in _verb_options().items()
        ]
        return _FISH.format(words=words, verbs="\n".join(verb_lines))
    if shell not in ("bash", "zsh"):
        raise ConfigError(f"--completion {shell}: give bash, zsh or fish")
    cases = [
        f'    {verb}) words="{options} $words" ;;' for verb, options in _verb_options().items()
    ]
    first = _ZSH if shell == "zsh" else ""
    return _BASH.format(shell=shell, first=first, words=words, verbs="\n".join(cases))


def _verb_options() -> dict[str, str]:
    """Return the options of each verb, separated by spaces. They are found in the source text of
    the verb's module, because importing all modules takes seconds."""
    options = {}
    for name, verb in VERBS.items():
        spec = find_spec(verb.module)
        assert spec is not None and spec.origin is not None
        text = Path(spec.origin).read_text(encoding="utf-8")
        options[name] = " ".join(sorted({"--help", *_OPTION.findall(text)}))
    return options


def _words() -> list[str]:
    """Return all words that can begin an argument: verbs, options, `group=choice`, and keys with
    their values."""
    words = [*VERBS, *(flag for flag, text in FLAGS.items() if text)]
    words += [
        f"{group}={choice}"
        for group in (*GROUPS, EXPERIMENT, f"+{EXPERIMENT}", PIPELINE)
        for choice in choices(group.lstrip("+"))
    ]
    for key in all_keys():
        if key.endswith(f".{_DEFAULTS}"):
            continue
        values = _values(key)
        words += [f"{key}={value}" for value in values] or [f"{key}="]
    return words


def _values(key: str) -> list[str]:
    """Return all values of a key that is a boolean or has a fixed set of values; empty for other
    keys."""
    hint = declared_type(key)
    if hint is bool:
        return ["true", "false"]
    return list(map(str, get_args(hint))) if get_origin(hint) is Literal else []
