"""Makes the row steps that the configuration key `rows` lists, by short names or by their classes.

`open_rows.py` calls `build_rows`, and `step_fingerprints` for the digests that decide whether a job
can be resumed.
"""

from __future__ import annotations

import dataclasses
import keyword
from collections.abc import Mapping, Sequence
from typing import Any

from batchgen.config.groups.class_names import CLASSES, lasting_step_name
from batchgen.config.groups.job_config import StepConfig
from batchgen.config.groups.named_code import named_code, strategy_options
from batchgen.evals.graders.build_steps import row_step
from batchgen.evals.graders.choices import RowStep
from batchgen.inputs.steps.table_step import TableStep
from batchgen.util.errors import ConfigError

Step = TableStep | RowStep


def build_rows(configs: Sequence[StepConfig]) -> tuple[Step, ...]:
    """Return the row steps of the configuration key `rows`. Raises ConfigError for a mistake in
    one."""
    return tuple(_built(number, config) for number, config in enumerate(configs))


def changes_rows(steps: Sequence[Step]) -> bool:
    """Return whether some step drops, splits or adds rows. Steps that only add columns do not."""
    return any(isinstance(step, TableStep) for step in steps)


def step_fingerprints(configs: Sequence[StepConfig], steps: Sequence[Step]) -> dict[str, str]:
    """Return the versions of the steps, and the digests of the files that they read, by readable
    names."""
    fingerprints = {}
    for number, (step, config) in enumerate(zip(steps, configs, strict=True)):
        name = lasting_step_name(config.target)  # equal in all versions of batchgen
        fingerprints[f"version of {name}"] = str(step.version)
        if isinstance(step, TableStep):
            try:
                digests = step.fingerprints()
            except ConfigError as error:
                raise ConfigError(f"rows[{number}] {type(step).__name__}: {error}") from None
            fingerprints |= {
                f"rows[{number}] {name}.{option}": digest for option, digest in digests.items()
            }
    return fingerprints


def _built(number: int, config: StepConfig) -> Step:
    key = f"rows[{number}]"
    cls = named_code(config.target, f"{key}._target_")
    if not (isinstance(cls, type) and issubclass(cls, TableStep)):
        return row_step(number, config)
    if not cls.stable:
        raise ConfigError(
            f"{key}._target_: {config.target} must say `stable = True`: what it decides about a "
            "row may depend on the rows up to this one alone (batchgen.TableStep)"
        )
    name = f"{key}.{config.target}" if config.target in CLASSES["rows"] else None
    try:
        step: TableStep = cls(**_options(cls, config.options, name or key))
    except ValueError as error:
        message = str(error)
        if not message.startswith(key):
            message = f"{name or key}: {message}"
        raise ConfigError(message) from None
    return step


def _options(cls: type[TableStep], values: Mapping[str, Any], where: str) -> dict[str, Any]:
    """Return the arguments of a step class from its options. Python keywords get an underscore
    (`as` becomes `as_`), and unknown options are collected in the field that `cls.rest` names, if
    the class has one: `Pick: {seed: 1, style: [terse]}` → `{seed: 1, pieces: {style: [terse]}}`."""
    named = {f"{key}_" if keyword.iskeyword(key) else key: v for key, v in values.items()}
    if cls.rest is not None:
        field_names = {field.name for field in dataclasses.fields(cls)}  # type: ignore[arg-type]
        if unknown := {key: value for key, value in values.items() if key not in field_names}:
            known = {key: value for key, value in named.items() if key in field_names}
            named = {**known, cls.rest: {**(known.get(cls.rest) or {}), **unknown}}
    return strategy_options(cls, named, where)
