"""Makes the steps that a configuration names in `post`, and those of `rows` that add columns, and
checks them.

Steps of `post` make columns of finished rows, such as their marks; steps of `rows` make columns
before the prompt. Jobs call the checks before they load a model, so that mistakes show early.
"""

from __future__ import annotations

import dataclasses
import sys
from collections.abc import Sequence
from dataclasses import is_dataclass
from typing import Any, Protocol

from batchgen.config.groups.class_names import lasting_name
from batchgen.config.groups.convert_value import plain_value
from batchgen.config.groups.job_config import StepConfig
from batchgen.config.groups.named_code import named_code, strategy_options
from batchgen.config.groups.output_config import ScoreConfig
from batchgen.evals.graders.choices import RowStep
from batchgen.evals.graders.grade_rows import StepChain
from batchgen.evals.graders.step import MARK, PostStep, SelfTimedStep
from batchgen.util.errors import ConfigError
from batchgen.util.shorten import some_names

_OF_ROWS = ("num_prompt_tokens", "num_generated_tokens")
"""Columns of numbers that all rows of an output have."""


class _Versioned(Protocol):
    """A step of either list."""

    @property
    def version(self) -> int: ...


def row_step(number: int, config: StepConfig) -> RowStep:
    """Make step `number` of `rows`, which adds columns."""
    step: RowStep = _step_of("rows", number, config, RowStep)
    return step


def post_steps(configs: Sequence[StepConfig]) -> tuple[PostStep, ...]:
    """Make the steps of `post`.

    Raises:
        ConfigError: a mistake in a step, or the steps do not fit together (see `StepChain`).
    """
    steps = tuple(_step_of("post", number, step, PostStep) for number, step in enumerate(configs))
    StepChain(steps)  # refuses columns that two steps write, or that are written too late
    return steps


def step_descriptions(
    configs: Sequence[StepConfig], steps: Sequence[_Versioned]
) -> list[dict[str, Any]]:
    """The class, the options and the version of each step as plain values. They decide the values
    of its columns, and are compared with those of other versions of batchgen."""
    return [
        {
            "_target_": lasting_name(config.target),
            "version": step.version,
            **plain_value(config.options),
        }
        for config, step in zip(configs, steps, strict=True)
    ]


def check_fields(steps: Sequence[PostStep], columns: Sequence[str]) -> None:
    """Check that the rows of a job's output have the columns that its `post` steps read.

    Raises:
        ConfigError: a column is missing.
    """
    for number, step in enumerate(steps):
        for name in step.field_names or ():
            if name not in columns:
                raise ConfigError(
                    f"post[{number}]: {type(step).__name__} reads the column {name!r}, which the "
                    f"rows of the output do not have: choose among {some_names(columns)}, or have "
                    "it copied (dataset.columns)"
                )


def check_machine(steps: Sequence[PostStep]) -> None:
    """Check that this machine can run the steps."""
    for step in steps:
        if isinstance(step, SelfTimedStep):
            step.check_machine()


def _step_of(key: str, number: int, config: StepConfig, protocol: type) -> Any:
    """Make a step, and check that its class has the members of `protocol`."""
    key_path = f"{key}[{number}]"
    target = f"{key_path}._target_: {config.target}"
    cls = named_code(config.target, f"{key_path}._target_")
    if not isinstance(cls, type):
        raise ConfigError(f"{target} is not a class")
    declared = {field.name for field in dataclasses.fields(cls)} if is_dataclass(cls) else set()
    members = [name for name in vars(protocol) if not name.startswith("_")]
    if lacks := [name for name in members if name not in declared and not hasattr(cls, name)]:
        raise ConfigError(
            f"{target} is not a step of {key}: the class has no {', '.join(lacks)} "
            f"({protocol.__module__}.{protocol.__name__} says what a step has)"
        )
    options = strategy_options(cls, config.options, key_path)
    try:
        return cls(**options)
    except ValueError as error:
        raise ConfigError(f"{key_path}: {error}") from None


def check_scored(post: Sequence[PostStep], config: ScoreConfig, columns: Sequence[str]) -> None:
    """Check before a job runs that it can be scored when it ends.

    Marks in a column with a prefix give no scores; if there are no others, a warning is printed to
    stderr.

    Raises:
        ConfigError: the column to score will not exist.
    """
    names = [column.name for step in post for column in step.columns]
    scored, rows = config.column, [*columns, *_OF_ROWS]
    if scored not in (MARK, *names, *rows):
        raise ConfigError(
            f"score.column: neither the steps of post nor the rows of the output have a column "
            f"{scored!r}: choose among {some_names([*names, *rows], scored)}"
        )
    marks = [name for name in names if name.endswith(f"_{MARK}")]
    if scored == MARK and MARK not in names and marks:
        print(
            f"batchgen: warning: there will be no scores: these are made of the column {MARK}, and "
            f"the steps of post write {', '.join(marks)}: leave out the prefix of one of them, or "
            f"score another column: score.column={marks[0]}",
            file=sys.stderr,
        )
    for key, name in {"subset": config.subset, "cluster": config.cluster}.items():
        if post and name is not None and name not in columns:
            raise ConfigError(
                f"score.{key}: the rows of the output have no column {name!r}: choose among "
                f"{some_names(columns)}, or have it copied (dataset.columns)"
            )
