"""Reads the comments of conf/*.yaml, which explain each choice and each of its keys. `batchgen
--help` and `batchgen init` show them, so that each explanation is written once."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from batchgen.config.groups.config_keys import choice_text


@dataclass(frozen=True)
class Entry:
    """One key of a choice.

    Attributes:
        comment: the comment lines above the key, without `#`.
        lines: the YAML lines of the key and its value.
    """

    name: str
    comment: tuple[str, ...]
    lines: tuple[str, ...]

    @property
    def value(self) -> str:
        """The value, as YAML."""
        return "\n".join(self.lines).partition(":")[2].strip()


@dataclass(frozen=True)
class GroupChoice:
    """One choice of a group.

    Attributes:
        about: the lines of the comment at the top of its file.
        entries: its keys, in the order of the file.
    """

    group: str
    name: str
    about: tuple[str, ...]
    entries: tuple[Entry, ...]


def read_choice(group: str, name: str, folders: Sequence[Path] = ()) -> GroupChoice:
    """Read a choice with its comments, from its file in conf/ or in one of the user's `folders`."""
    about: tuple[str, ...] | None = None
    entries: list[Entry] = []
    comment: list[str] = []
    for line in choice_text(group, name, folders).splitlines():
        if line.startswith("#"):
            comment.append(line[1:].removeprefix(" "))
        elif about is None and not line.startswith(" "):
            # The first comment describes the file, even if a key follows without an empty line.
            about = tuple(text for text in comment if not text.startswith("@package"))
            comment = []
            entries += [Entry(line.partition(":")[0], (), (line,))] if line else []
        elif line.startswith((" ", "-")) and entries:
            last = entries.pop()
            entries.append(Entry(last.name, last.comment, (*last.lines, line)))
        elif line:
            entries.append(Entry(line.partition(":")[0], tuple(comment), (line,)))
            comment = []
    return GroupChoice(group, name, about or (), tuple(entries))
