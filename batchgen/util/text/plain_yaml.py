"""Reads YAML from users and strangers: plain values only, within limits.

Every YAML file that is not batchgen's own is read here, so that none can take long, run code, or be
infinite. The content of an anchor counts again for each alias, and a value cannot contain itself.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Any, ClassVar

import yaml

from batchgen.util.errors import ConfigError

MOST_BYTES = 2**20
"""The most bytes of a file."""
MOST_VALUES = 50_000
"""The most texts, numbers, lists and mappings of a file, including those that aliases and
references repeat. A long text counts once for each 80 characters."""
DEEPEST = 64
"""The most levels of nested lists and mappings."""
_CORE = "tag:yaml.org,2002:"
_TAGS = {f"{_CORE}{name}" for name in ("str", "int", "float", "bool", "null", "map", "seq")}
_IMPLICIT = {f"{_CORE}{name}" for name in ("int", "float", "bool", "null", "merge")}
# Numbers in base 60, such as 1:30, which YAML 1.1 has.
_SIXTIES = re.compile(r"[-+]?[0-9][0-9_]*(?::[0-5]?[0-9])+(?:\.[0-9_]*)?$")
_BASE: Any = yaml.CSafeLoader if yaml.__with_libyaml__ else yaml.SafeLoader
_DUMPER: Any = yaml.CSafeDumper if yaml.__with_libyaml__ else yaml.SafeDumper


class _Loader(_BASE):  # type: ignore[misc]
    """Reads dates, times and `=` as text; YAML 1.1 would read dates, numbers in base 60, and a
    special value."""

    yaml_implicit_resolvers: ClassVar = {
        # The first character of a text → (tag, pattern) of the types that it may have.
        first: [(f"{_CORE}str", _SIXTIES), *((t, p) for t, p in resolvers if t in _IMPLICIT)]
        for first, resolvers in _BASE.yaml_implicit_resolvers.items()
    }


@dataclass(frozen=True)
class YamlDocument:
    """A parsed YAML file within the limits.

    Attributes:
        root: the root node, with line numbers; None for an empty file.
        name: the name of the file, for messages.
    """

    root: yaml.Node | None
    name: str
    _loader: Any

    def values(self) -> Any:
        """Return the values of the nodes. Raises ConfigError if a value is malformed."""
        if self.root is None:
            return None
        try:
            return self._loader.construct_document(self.root)
        except yaml.MarkedYAMLError as error:
            raise ConfigError(
                f"{at_line(self.name, error.problem_mark)}: {error.problem}"
            ) from None
        except (ValueError, OverflowError) as error:  # of int() and float()
            raise ConfigError(f"{self.name} has a malformed number: {error}") from None


def read_yaml(content: str | bytes, name: str) -> YamlDocument:
    """Parse a YAML file.

    Args:
        name: the name of the file, for messages.

    Raises:
        ConfigError: the file is not YAML, exceeds a limit, or has a tag other than those of texts,
            numbers, lists and mappings.
    """
    try:
        text = content if isinstance(content, str) else content.decode("utf-8-sig")
        if len(content) > MOST_BYTES:
            raise ConfigError(
                f"{name} has more than {MOST_BYTES >> 20} MiB, which is too large for a file of "
                "keys"
            )
        _Size(name).add_all(text)
        loader = _Loader(text)
        return YamlDocument(loader.get_single_node(), name, loader)
    except UnicodeError:
        raise ConfigError(f"{name} cannot be read: it is not UTF-8") from None
    except yaml.MarkedYAMLError as error:
        where = at_line(name, error.problem_mark)
        raise ConfigError(f"{where}: not YAML: {error.problem}") from None
    except yaml.YAMLError as error:
        raise ConfigError(f"{name} is not YAML: {' '.join(str(error).split())}") from None


def load_yaml(content: str | bytes, name: str) -> Any:
    """Return the values of a YAML file; see `read_yaml`."""
    return read_yaml(content, name).values()


def yaml_text(values: dict[str, Any], width: int = 80) -> str:
    """Return the values as YAML, in their order."""
    options: Any = {"sort_keys": False, "allow_unicode": True, "width": width}
    text: str = yaml.dump(values, Dumper=_DUMPER, **options)
    # libyaml escapes emoji, so PyYAML's own dumper writes those texts.
    return yaml.safe_dump(values, **options) if "\\U" in text else text


def at_line(name: str, mark: Any) -> str:
    """Return the file and the line of a mark, as the beginning of a message."""
    return name if mark is None else f"{name}, line {mark.line + 1}"


def text_size(text: str) -> int:
    """Return the number of values that a text counts as."""
    return 1 + len(text) // 80


@dataclass
class _Counted:
    """The number of values in a node, including itself, and the depth of its nesting."""

    values: int = 0
    depth: int = 0


class _Size:
    """Measures a file from its parse events, before any value is built."""

    def __init__(self, name: str) -> None:
        self._name = name
        self._all = _Counted()
        self._open: list[tuple[_Counted, str | None]] = []  # enclosing nodes and their anchors
        self._anchored: dict[str | None, _Counted | None] = {}  # None inside the anchored node

    def add_all(self, text: str) -> None:
        """Measure a file. Raises ConfigError at the first event that exceeds a limit."""
        for event in yaml.parse(text, _Loader):
            if isinstance(event, yaml.CollectionEndEvent):
                self._close()
            elif isinstance(event, yaml.NodeEvent):
                where = at_line(self._name, event.start_mark)
                self._check_tag(getattr(event, "tag", None), where)
                if isinstance(event, yaml.AliasEvent):
                    self._add(self._of_alias(event.anchor, where), where)
                elif isinstance(event, yaml.ScalarEvent):
                    size = _Counted(text_size(event.value))
                    if event.anchor is not None:
                        self._anchored[event.anchor] = size
                    self._add(size, where)
                else:
                    self._add(_Counted(1), where)
                    self._open.append((_Counted(1, 1), event.anchor))
                    if event.anchor is not None:
                        self._anchored[event.anchor] = None

    def _of_alias(self, anchor: str | None, where: str) -> _Counted:
        size = self._anchored.get(anchor, _Counted())  # the loader reports unknown anchors
        if size is None:
            raise ConfigError(
                f"{where}: *{anchor} is used inside &{anchor} itself, which would never end"
            )
        return size

    def _close(self) -> None:
        size, anchor = self._open.pop()
        if anchor is not None:
            self._anchored[anchor] = size
        if self._open:
            outer, _ = self._open[-1]
            outer.depth = max(outer.depth, size.depth + 1)

    def _add(self, size: _Counted, where: str) -> None:
        """Count a node in the file and in each node around it."""
        for counted in (self._all, *(outer for outer, _ in self._open)):
            counted.values += size.values
        if self._open:
            outer, _ = self._open[-1]
            outer.depth = max(outer.depth, size.depth + 1)
        if self._all.values > MOST_VALUES:
            raise ConfigError(
                f"{where}: with its aliases expanded, the file has more than {MOST_VALUES:,} "
                "values: write out only what is needed"
            )
        if len(self._open) + size.depth > DEEPEST:
            raise ConfigError(
                f"{where}: lists and mappings are nested more than {DEEPEST} deep, which no key "
                "needs"
            )

    @staticmethod
    def _check_tag(tag: str | None, where: str) -> None:
        if tag not in (None, "!", *_TAGS):
            short = tag.replace(_CORE, "!!") if tag else ""
            raise ConfigError(
                f"{where}: the tag {short:.80} is not allowed, because only plain values are "
                "read: leave it out, or put the text in quotes"
            )
