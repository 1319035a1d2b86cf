"""Reads the steps of `rows` and `post`, and classes with options, from plain values;
`load_config.py` calls it.

    [{"Filter": {"where": "x > 1"}}]  →  (StepConfig(target="Filter", options={"where": "x > 1"}),)
"""

from __future__ import annotations

import re
from typing import Any

from batchgen.config.groups.class_names import CLASSES
from batchgen.config.groups.convert_value import (
    check_keys,
    convert,
)
from batchgen.config.groups.job_config import (
    StepConfig,
)
from batchgen.util.errors import ConfigError


def target_and_options(values: dict[str, Any], prefix: str) -> dict[str, Any]:
    """The arguments `target` and `options` of StepConfig, StrategyConfig or LauncherConfig."""
    check_keys(values, allowed=list(values), required=["_target_"], prefix=prefix)
    target = convert(values["_target_"], str, f"{prefix}_target_")
    options = {str(name): value for name, value in values.items() if name != "_target_"}
    return {"target": target, "options": options}


def step_configs(values: Any, key: str) -> tuple[StepConfig, ...]:
    """Build the steps of the list `key`, `rows` or `post`.

    Raises:
        ConfigError: the value is not a list of steps.
    """
    example = "Filter: {where: …}" if key == "rows" else "Extract: {methods: [boxed]}"
    form = (
        f"{key} must be a list of steps such as [{{{example}}}] or "
        "[{_target_: package.module.Class}]"
    )
    if not isinstance(values, list | None):
        raise ConfigError(f"{form}, got {values!r}")
    steps = []
    for number, step in enumerate(values or ()):
        if isinstance(step, str) and (bare := re.match(r"(\w+): *\{", step)):
            name = bare[1]
            raise ConfigError(f"{key}: each step needs braces around it: [{{{name}: {{…}}}}]")
        if not isinstance(step, dict):
            raise ConfigError(f"{form}, got {step!r} in it")
        if len(step) == 1 and "_target_" not in step:
            step = _long_form(step, key, f"{key}[{number}]")
        steps.append(StepConfig(**target_and_options(step, f"{key}[{number}].")))
    return tuple(steps)


def _long_form(step: dict[str, Any], key: str, where: str) -> dict[str, Any]:
    """A step of the form `{NAME: options}` in the form with `_target_` among its options."""
    ((name, options),) = step.items()
    other = "post" if key == "rows" else "rows"
    if name in CLASSES[other]:
        what = {"rows": "chooses or makes rows", "post": "grades answers"}[other]
        raise ConfigError(
            f"{where}: {name} {what}, and belongs in {other}: {other}=[{{{name}: …}}]"
        )
    if name not in CLASSES[key]:
        raise ConfigError(
            f"{where}: there is no step {name!r}: choose among {', '.join(CLASSES[key])}, or name "
            f"a class with _target_ (batchgen --help {key})"
        )
    if options is not None and not isinstance(options, dict):
        raise ConfigError(f"{where}.{name} must be a mapping of options, got {options!r}")
    return {"_target_": name, **(options or {})}
