"""What `${…}` in a configuration may ask for: the values of other keys.

OmegaConf has resolvers, too, such as `${oc.env:NAME}` for a variable of the environment. A
configuration is shown and kept (config.yaml, manifest.json, report.html), and may be a stranger's.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator
from typing import Any

from omegaconf.errors import OmegaConfBaseException
from omegaconf.grammar.gen.OmegaConfGrammarParser import OmegaConfGrammarParser
from omegaconf.grammar_parser import parse

from batchgen.util.errors import ConfigError

NO_REFERENCE = (
    "has ${ and no reference behind it: ${KEY} takes the value of another key; write \\${ for the "
    "text"
)
RESOLVERS_OF_HYDRA = [
    f"${{hydra:job.{name}}}" for name in ("num", "id", "name", "override_dirname")
]
"""What a job that one of Hydra's launchers starts may ask it for, to have a folder of its own."""


def refuse_resolvers(value: Any, allowed: Collection[str], key: str = "") -> None:
    """Raise ConfigError for texts that ask for anything but the values of other keys or what is
    allowed, as `${hydra:job.num}`, and for `${` without a reference behind it."""
    if isinstance(value, dict):
        for name, item in value.items():
            refuse_resolvers(item, allowed, f"{key}.{name}" if key else str(name))
    elif isinstance(value, list):
        for number, item in enumerate(value):
            refuse_resolvers(item, allowed, f"{key}[{number}]")
    elif isinstance(value, str) and "${" in value:
        try:
            tree = parse(value)
        except OmegaConfBaseException:
            raise ConfigError(f"{key} {NO_REFERENCE}") from None
        for asked in _resolvers(tree):
            if asked not in allowed:
                raise ConfigError(
                    f"{key}: {asked} is not resolved: only the value of another key can be taken, "
                    "with ${KEY}: write the value itself, or \\${ for the text"
                )


def _resolvers(tree: Any) -> Iterator[str]:
    """The resolvers in what OmegaConf's grammar makes of a text, with their arguments."""
    if isinstance(tree, OmegaConfGrammarParser.InterpolationResolverContext):
        yield tree.getText()
    for child in getattr(tree, "children", None) or ():
        yield from _resolvers(child)
