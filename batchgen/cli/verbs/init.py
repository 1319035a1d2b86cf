"""The verb `batchgen init FILE [GROUP=CHOICE …] [KEY=VALUE …]`: writes a job file in which comments
explain each key."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any

from batchgen.cli.conf_files import Entry, read_choice
from batchgen.cli.verb_table import VerbParser
from batchgen.config.compose.compose_config import Composed, compose_groups
from batchgen.config.compose.user_values import CHOICE
from batchgen.config.groups.config_keys import STEP_LISTS, choice_values, choices
from batchgen.storage.stores.whole_file import write_atomic
from batchgen.util.paths import user_path
from batchgen.util.text.plain_yaml import yaml_text

_HEAD = """\
# A batchgen job. This command runs it, and resumes it after a stop:
#   batchgen {file}
# To change a key for one run: batchgen {file} sampling.n=4
# Paths are relative to the folder where the command runs. Keys that are left out are as in conf/.
"""
_CHOICE_KEYS = ("kind", "_target_")
"""Keys that are not written, because the choice decides them."""


def main(arguments: Sequence[str]) -> int:
    """Write the file, and return the exit code. Raises ConfigError if the configuration has a
    mistake."""
    parser = VerbParser(
        "init",
        "Write a job file with all keys and what they mean.",
        epilog="batchgen init job.yaml model=hf model.path=Qwen/Qwen3-0.6B dataset=files",
    )
    parser.add_argument("file", help="where to write it")
    parser.add_argument(
        "override", nargs="*", default=[], help="GROUP=CHOICE or KEY=VALUE, as for the job itself"
    )
    args = parser.parse_args(arguments)
    text = new_job_file(compose_groups({}, args.override), args.file)
    write_atomic(user_path(args.file, "the job file"), text, args.file)
    print(f"{args.file} is written: change what you like, then run `batchgen {args.file}`")
    return 0


def new_job_file(composed: Composed, file: str) -> str:
    """Return the text of a job file: all keys of the chosen groups, with the comments of conf/.

    Args:
        file: the name of the file, for the comment at its top.
    """
    parts = [_HEAD.format(file=file)]
    for group, values in composed.groups.items():
        if group in STEP_LISTS:
            if values:
                parts.append(yaml_text({group: values}))
            continue
        name = composed.choices[group]
        choice = read_choice(group, name)
        others = [other for other in choices(group) if other != name]
        lines = [f"{group}:", *(f"  # {line}".rstrip() for line in choice.about)]
        remark = f"  # or {', '.join(others)}" if others else ""
        lines.append(f"  {CHOICE}: {name}{remark}")
        entries = {entry.name: entry for entry in choice.entries}
        for key, value in values.items():
            if key not in _CHOICE_KEYS:
                lines += _key_lines(entries.get(key), key, value, choice_values(group, name))
        parts.append("\n".join(lines) + "\n")
    return "\n".join(parts)


def _key_lines(entry: Entry | None, key: str, value: Any, defaults: Mapping[str, Any]) -> list[str]:
    """Return the lines of one key: its comment from conf/, and its value.

    Args:
        entry: the key as conf/ has it; None if conf/ does not have it.
        defaults: the values in conf/. A default value is written as in conf/.
    """
    comment = [] if entry is None else [f"  # {line}".rstrip() for line in entry.comment]
    if entry is not None and value == defaults[key]:
        return [*comment, *(f"  {line}" for line in entry.lines)]
    if isinstance(value, str):  # JSON text is valid YAML, and shows line breaks
        text = f"{key}: {json.dumps(value, ensure_ascii=False)}"
    else:
        text = yaml_text({key: value}, width=10_000)
    return [*comment, *(f"  {line}" for line in text.splitlines())]
