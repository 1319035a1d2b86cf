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
    try:
        root = yaml.compose(text, _LOADER)
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
    values: dict[str, Any] = yaml.load(text, _LOADER)
    return values, places


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
