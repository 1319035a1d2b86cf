"""`batchgen --completion bash`: a script after which TAB completes groups, choices and keys.

The words are written into the script, so that a TAB starts no process.
"""

from __future__ import annotations

import shlex
from typing import Literal, get_args, get_origin

from batchgen.cli.options import FLAGS
from batchgen.cli.verb_table import VERBS
from batchgen.config.groups.config_keys import EXPERIMENT, GROUPS, all_keys, choices, declared_type
from batchgen.pipelines.run.pipeline_file import PIPELINE
from batchgen.util.errors import ConfigError

_BASH = """\
# batchgen: eval "$(batchgen --completion {shell})" in the start file of your shell
{first}_batchgen() {{
    local line=${{COMP_LINE:0:COMP_POINT}} words={words}
    local current=${{line##*[[:space:]]}}
    local value=${{current#*=}}
    COMPREPLY=($(compgen -W "$words" -- "$current"))
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
_ZSH = "autoload -U +X bashcompinit && bashcompinit\n"
_FISH = """\
# batchgen: batchgen --completion fish | source
complete -c batchgen -a {words}
"""


def completion_script(shell: str) -> str:
    """The script for a shell; ConfigError for one that has none."""
    words = shlex.quote(" ".join(_words()))
    if shell == "fish":
        return _FISH.format(words=words)
    if shell not in ("bash", "zsh"):
        raise ConfigError(f"--completion {shell}: give bash, zsh or fish")
    return _BASH.format(shell=shell, first=_ZSH if shell == "zsh" else "", words=words)


def _words() -> list[str]:
    words = [*VERBS, *(flag for flag, text in FLAGS.items() if text)]
    words += [
        f"{group}={choice}"
        for group in (*GROUPS, EXPERIMENT, PIPELINE)
        for choice in choices(group)
    ]
    for key in all_keys():
        values = _values(key)
        words += [f"{key}={value}" for value in values] or [f"{key}="]
    return words


def _values(key: str) -> list[str]:
    """All values that a key can have, if they are few."""
    hint = declared_type(key)
    if hint is bool:
        return ["true", "false"]
    return list(map(str, get_args(hint))) if get_origin(hint) is Literal else []
