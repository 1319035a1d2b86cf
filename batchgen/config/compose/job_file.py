"""Job files: YAML with the keys of the command line."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import yaml

from batchgen.util.errors import ConfigError

_LOADER = yaml.CSafeLoader if yaml.__with_libyaml__ else yaml.SafeLoader


def read_job_file(path: Path) -> tuple[dict[str, Any], dict[str, str]]:
    """The values of a job file as `compose` takes them, and for each key (GROUP.KEY) the file and
    line with its name, for error messages. ConfigError if it cannot be read as one mapping."""
    try:
        text = path.read_text(encoding="utf-8-sig")
    except (OSError, UnicodeDecodeError) as error:
        reason = error.strerror if isinstance(error, OSError) else "it is not UTF-8"
        raise ConfigError(f"the job file {path} cannot be read: {reason}") from None
    return read_job_text(text, path)


def read_job_text(text: str, path: Path) -> tuple[dict[str, Any], dict[str, str]]:
    """What `read_job_file` returns, of the text of the file at `path`."""
    loader = _LOADER(text)
    try:
        root = loader.get_single_node()
    except yaml.MarkedYAMLError as error:
        raise ConfigError(f"{_line(path, error.problem_mark)}: not YAML: {error.problem}") from None
    except yaml.YAMLError as error:
        raise ConfigError(f"{path} is not YAML: {error}") from None
    if root is None:
        return {}, {}
    if not isinstance(root, yaml.MappingNode):
        raise ConfigError(f"{path}: a job file has keys and values, such as `model: hf`")
    places: dict[str, str] = {}
    _note(root, "", path, places)
    _keep_text(root)
    values: dict[str, Any] = loader.construct_document(root)
    return values, places


def _keep_text(root: yaml.Node) -> None:
    """Take `on:`, `yes:` and the like for names of keys, where YAML 1.1 has true and false, and a
    day such as 2026-11-25 for text."""
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
        elif node.tag == "tag:yaml.org,2002:timestamp":
            node.tag = "tag:yaml.org,2002:str"


def _note(node: yaml.MappingNode, prefix: str, path: Path, places: dict[str, str]) -> None:
    """Note the places of the keys of a mapping, and of the mappings in it."""
    for key, value in node.value:
        where = _line(path, key.start_mark)
        if not isinstance(key, yaml.ScalarNode):
            raise ConfigError(
                f"{where}: a text that begins with {{ or [ needs quotes in YAML: "
                '"{{ question }}"'
            )
        name = prefix + key.value
        if name in places:
            raise ConfigError(f"{where}: the key {name} is there twice")
        places[name] = f"{where}: {name}"
        if isinstance(value, yaml.MappingNode):
            _note(value, f"{name}.", path, places)


def _line(path: Path, mark: yaml.Mark | None) -> str:
    return str(path) if mark is None else f"{path}, line {mark.line + 1}"
