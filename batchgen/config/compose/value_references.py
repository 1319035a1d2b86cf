"""Checks the references `${…}` in a configuration, which may only take the values of other keys.

OmegaConf also has resolvers, such as `${oc.env:NAME}` for a variable of the environment. They are
refused, because a configuration may come from a stranger and is copied into files that others see
(config.yaml, manifest.json, report.html): a resolver could publish a secret.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Iterator, Sequence
from typing import Any

from omegaconf.errors import OmegaConfBaseException
from omegaconf.grammar.gen.OmegaConfGrammarParser import OmegaConfGrammarParser
from omegaconf.grammar_parser import parse

from batchgen.util.errors import ConfigError
from batchgen.util.text.plain_yaml import MOST_VALUES, text_size

MOST_REFERENCES = 32
"""The most references in one text."""
_BEGINS = re.compile(r"(?<!\\)(?:\\\\)*\$\{")  # no backslash, or an even number, before it
NO_REFERENCE = (
    "has ${ without a reference after it: ${KEY} takes the value of another key; write \\${ for "
    "the text"
)
RESOLVERS_OF_HYDRA = [
    f"${{hydra:job.{name}}}" for name in ("num", "id", "name", "override_dirname")
]
"""The resolvers that are allowed in jobs that one of Hydra's launchers starts, so that each job
gets another folder."""


def refuse_resolvers(value: Any, allowed: Collection[str], key: str = "") -> None:
    """Check all texts of a value; `key` is the key of the value.

    Raises:
        ConfigError: a text has a resolver that is not `allowed`, a reference in a reference, more
            than MOST_REFERENCES, or `${` without a reference.
    """
    if isinstance(value, dict):
        for name, item in value.items():
            refuse_resolvers(item, allowed, f"{key}.{name}" if key else str(name))
    elif isinstance(value, list):
        for number, item in enumerate(value):
            refuse_resolvers(item, allowed, f"{key}[{number}]")
    elif isinstance(value, str) and "${" in value:
        if sum(1 for _ in _BEGINS.finditer(value)) > MOST_REFERENCES:
            raise ConfigError(f"{key} has more than {MOST_REFERENCES} references ${{KEY}}")
        try:
            tree = parse(value)
        except OmegaConfBaseException:
            raise ConfigError(f"{key} {NO_REFERENCE}") from None
        for resolver in _resolvers(tree):
            if resolver not in allowed:
                raise ConfigError(
                    f"{key}: {resolver} is not resolved: only the value of another key can be "
                    "taken, with ${KEY}: write the value itself, or \\${ for the text"
                )
        if any("${" in name for name in _keys(tree)):
            raise ConfigError(
                f"{key}: a reference ${{KEY}} names a key and cannot contain another reference"
            )


def refuse_endless(groups: Any) -> None:
    """Check that a configuration has at most MOST_VALUES values once every reference is replaced by
    the value that it refers to.

    Raises:
        ConfigError: it has more.
    """
    if _Sizes(groups).of(groups, ()) > MOST_VALUES:
        raise ConfigError(
            f"with its references ${{KEY}} replaced by their values, the configuration has more "
            f"than {MOST_VALUES:,} values: remove references"
        )


class _Sizes:
    """The sizes of parts of a configuration: the number of values in a part, where a reference
    counts as many as the part that it refers to."""

    def __init__(self, groups: Any) -> None:
        self._groups = groups
        self._sizes: dict[tuple[Any, ...], int] = {}

    def of(self, value: Any, path: tuple[Any, ...]) -> int:
        """The size of the value at a path. A value that refers to itself counts 0; OmegaConf raises
        an error for it later."""
        if path not in self._sizes:
            self._sizes[path] = 0
            items: Sequence[tuple[Any, Any]] = ()
            size = 1
            if isinstance(value, dict):
                items = list(value.items())
            elif isinstance(value, list):
                items = list(enumerate(value))
            elif isinstance(value, str):
                size = text_size(value)
                if "${" in value:
                    size += sum(self._of_key(key, path) for key in _keys(parse(value)))
            self._sizes[path] = size + sum(self.of(item, (*path, key)) for key, item in items)
        return self._sizes[path]

    def _of_key(self, key: str, path: tuple[Any, ...]) -> int:
        """The size of the part that the reference `key`, in the text at a path, refers to; 0 if
        there is no such part."""
        # As in OmegaConf: a key that begins with dots is relative to the text. One dot is the
        # mapping that holds the text, each further one the mapping above.
        dots = len(key) - len(key.lstrip("."))
        names: list[Any] = list(path[: max(0, len(path) - dots)]) if dots else []
        names += [name for name in re.split(r"[.\[\]]+", key) if name]
        value = self._groups
        for number, name in enumerate(names):
            if isinstance(value, list) and str(name).isdecimal() and int(name) < len(value):
                names[number] = int(name)
            elif not isinstance(value, dict) or name not in value:
                return 0
            value = value[names[number]]
        return self.of(value, tuple(names))


def _keys(tree: Any) -> Iterator[str]:
    """Yield the keys that references name, in the tree into which OmegaConf parses a text."""
    if isinstance(tree, OmegaConfGrammarParser.InterpolationNodeContext):
        yield tree.getText()[2:-1].strip()  # without `${` and `}`
    for child in getattr(tree, "children", None) or ():
        yield from _keys(child)


def _resolvers(tree: Any) -> Iterator[str]:
    """Yield the resolvers, with their arguments, in the tree into which OmegaConf parses a text."""
    if isinstance(tree, OmegaConfGrammarParser.InterpolationResolverContext):
        yield tree.getText()
    for child in getattr(tree, "children", None) or ():
        yield from _resolvers(child)
