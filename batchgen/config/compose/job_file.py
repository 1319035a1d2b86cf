"""Reads job files: YAML with the keys of the command line.

    sampling: {n: 4}  →  {"sampling": {"n": 4}}, and the location of the key sampling.n

`batchgen/cli/run_options.py` passes both to `compose_groups`.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import yaml

from batchgen.config.groups.class_names import without_gone_keys
from batchgen.util.errors import ConfigError
from batchgen.util.text.plain_yaml import MOST_BYTES, at_line, read_yaml

_LONGEST = 1000  # characters of a key's full name


def read_job_file(path: Path) -> tuple[dict[str, Any], dict[str, str]]:
    """Read a job file.

    Returns:
        The values as `compose` takes them; and for each key (GROUP.KEY) its file and line, for
        error messages.

    Raises:
        ConfigError: the file cannot be read, or is not one mapping.
    """
    try:
        with path.open("rb") as file:
            content = file.read(MOST_BYTES + 1)
    except OSError as error:
        raise ConfigError(f"the job file {path} cannot be read: {error.strerror}") from None
    return read_job_text(content, path)


def read_job_text(content: str | bytes, path: Path) -> tuple[dict[str, Any], dict[str, str]]:
    """Parse the content of the job file at `path`; see `read_job_file`."""
    document = read_yaml(content, str(path))
    root = document.root
    if root is None:
        return {}, {}
    if not isinstance(root, yaml.MappingNode):
        raise ConfigError(f"{path}: a job file has keys and values, such as `model: hf`")
    locations: dict[str, str] = {}
    _collect_locations(root, "", path, locations)
    _read_keys_as_text(root)
    return without_gone_keys(document.values()), locations


def _read_keys_as_text(root: yaml.Node) -> None:
    """Read `on:`, `yes:` and the like as names of keys, where YAML 1.1 has true and false."""
    nodes, seen = [root], set[int]()
    while nodes:
        node = nodes.pop()
        if id(node) in seen:
            continue
        seen.add(id(node))
        if isinstance(node, yaml.MappingNode):
            for key, value in node.value:
                if key.tag == "tag:yaml.org,2002:bool":
                    key.tag = "tag:yaml.org,2002:str"
                nodes.append(value)
        elif isinstance(node, yaml.SequenceNode):
            nodes += node.value


def _collect_locations(
    node: yaml.MappingNode, prefix: str, path: Path, locations: dict[str, str]
) -> None:
    """Add the locations of the keys of a mapping, and of the mappings in it, to `locations`.

    A location is a text: file, line and full name of the key. Raises ConfigError for a key that is
    not a text, is too long, or appears twice.
    """
    for key, value in node.value:
        where = at_line(str(path), key.start_mark)
        if not isinstance(key, yaml.ScalarNode):
            raise ConfigError(
                f"{where}: a text that begins with {{ or [ needs quotes in YAML: "
                '"{{ question }}"'
            )
        name = prefix + key.value
        if len(name) > _LONGEST:
            raise ConfigError(
                f"{where}: a key has a name of more than {_LONGEST} characters, which is too long"
            )
        if name in locations:
            raise ConfigError(f"{where}: the key {name} appears twice")
        locations[name] = f"{where}: {name}"
        if isinstance(value, yaml.MappingNode):
            _collect_locations(value, f"{name}.", path, locations)
