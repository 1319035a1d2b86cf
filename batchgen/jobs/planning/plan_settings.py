"""The settings `plan.KEY=VALUE` of `batchgen plan`. They are not part of the job's
configuration."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, get_type_hints

from batchgen.util.errors import ConfigError


@dataclass(frozen=True, slots=True, kw_only=True)
class PlanSettings:
    """The settings of a plan; `batchgen plan --help` explains the keys.

    Attributes:
        like: the folder of an earlier job whose measurements are used.
        device: the device to plan for; None means that of the job on this machine.
        most_bad: the share of rows with an error above which a plan has an error.
    """

    like: str | None = None
    device: str | None = None
    most_bad: float = 0.01

    def __post_init__(self) -> None:
        from batchgen.jobs.forecast.devices import device_named

        if not 0 <= self.most_bad <= 1:
            raise ConfigError(f"plan.most_bad must be a share from 0 to 1, got {self.most_bad}")
        if self.device is not None:
            device_named(self.device)


def split_settings(arguments: Sequence[str]) -> tuple[PlanSettings, list[str]]:
    """Split the command's arguments into the settings of the plan and the arguments of the job, in
    their order.

    Raises:
        ConfigError: a setting is unknown, of a wrong type or out of range.
    """
    from batchgen.config.groups.config_keys import nearest
    from batchgen.config.groups.convert_value import build
    from batchgen.config.groups.read_value import Unreadable, read_value

    hints = get_type_hints(PlanSettings)
    values: dict[str, Any] = {}
    others = []
    for argument in arguments:
        key, equals, text = argument.partition("=")
        group, _, name = key.lstrip("+").partition(".")
        if group != "plan":
            others.append(argument)
            continue
        if name not in hints:
            guess = nearest(name, hints)
            listed = f"did you mean plan.{guess}?" if guess else f"choose among {', '.join(hints)}"
            raise ConfigError(f"{argument}: plan has no key {name!r}: {listed}")
        if not equals:
            raise ConfigError(f"{argument} has no value: write plan.{name}=…")
        try:
            values[name] = read_value(text, hints[name], escapes=False)
        except Unreadable as error:
            raise ConfigError(f"{argument} cannot be read: {error}") from None
    return build(PlanSettings, values, "plan"), others
