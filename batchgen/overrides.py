"""Arguments `key=value` that Hydra's grammar cannot read, and how to write them so that it can."""

from __future__ import annotations

import shlex
from collections.abc import Iterator, Sequence

from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.core.override_parser.types import Quote, QuotedString
from hydra.errors import OverrideParseException

_OPTIONS_WITH_VALUE = {
    *("--cfg", "-c", "--package", "-p", "--config-path", "-cp", "--config-name", "-cn"),
    *("--config-dir", "-cd", "--experimental-rerun", "--info", "-i"),
}
"""Options of Hydra's command line whose value is the next argument."""


def unreadable_override(arguments: Sequence[str]) -> str | None:
    """The message for the first argument whose value Hydra cannot read; None if it can read all.

    Hydra's grammar gives a meaning to `=`, `,`, `:`, quotes and brackets, so that a value which has
    them must stand in quotes of its own, inside those of the shell. The message shows the argument
    as it has to be typed. An argument that quotes do not help is left to Hydra's own message.

    Args:
        arguments: of the command line, without the program's name.
    """
    parser = OverridesParser.create()
    for argument in _overrides(arguments):
        try:
            parser.parse_overrides([argument])
        except OverrideParseException as error:
            key, _, value = argument.partition("=")
            quoted = f"{key}={QuotedString(value, Quote.double).with_quotes()}"
            try:
                parser.parse_overrides([quoted])
            except OverrideParseException:
                continue
            why = str(error).splitlines()[0].strip()
            return (
                f"{argument} cannot be read ({why}): if the value is text, quote it twice, for the "
                f"shell and for Hydra: {shlex.quote(quoted)}"
            )
    return None


def _overrides(arguments: Sequence[str]) -> Iterator[str]:
    for before, argument in zip(["", *arguments], arguments, strict=False):
        if "=" in argument and not argument.startswith("-") and before not in _OPTIONS_WITH_VALUE:
            yield argument
