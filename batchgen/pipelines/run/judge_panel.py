"""The key `judge.models` of a pipeline's step: several judges of the same answers, and their
majority.

`panel_steps` replaces the step by one step per model. The step of the last judge keeps the name
from the file; it joins the marks of the other judges and computes the majority.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from batchgen.config.compose.user_values import CHOICE
from batchgen.config.groups.sampling_config import SamplingConfig
from batchgen.evals.graders.step import MARK
from batchgen.pipelines.run.judge import JUDGE
from batchgen.util.errors import ConfigError

MODELS = "models"
_MODEL = "model"
_NAME = re.compile(r"[A-Za-z]\w{0,19}", re.ASCII)
"""The names that a judge may have."""


@dataclass(frozen=True)
class Panel:
    """The other judges, whose marks the last judge's step reads.

    Attributes:
        steps: name of each judge except the last → its step.
        last_judge: the name of the last judge.
    """

    steps: Mapping[str, str]
    last_judge: str

    def values(self, values: Mapping[str, Any]) -> dict[str, Any]:
        """Return the keys of the last judge's step.

        Args:
            values: the keys that the step would have if it were the only judge.
        """
        joins = [
            {
                "Join": {
                    "from": step,
                    "on": {"row_id": "row_id"},
                    "columns": {f"grades.{MARK}": f"{name}_{MARK}"},
                    "missing": "null",
                }
            }
            for name, step in self.steps.items()
        ]
        post = [_renamed(step, f"{self.last_judge}_") for step in values["post"]]
        is_scale = "ParseScore" in values["post"][0]
        majority = {
            "marks": [f"{name}_{MARK}" for name in self.steps],
            "own": f"{self.last_judge}_{MARK}",
            "by": "median" if is_scale else "votes",
        }
        rows = [*values.get("rows", ()), *joins]
        return {**values, "rows": rows, "post": [*post, {"Majority": majority}]}


def _renamed(step: Mapping[str, Mapping[str, Any]], prefix: str) -> dict[str, Any]:
    """Add a prefix to the names of the columns that a step of `post` writes."""
    ((name, options),) = step.items()
    return {name: {**options, "prefix": prefix + options.get("prefix", "")}}


def panel_steps(
    name: str, options: Mapping[str, Any], start: str
) -> dict[str, tuple[dict[str, Any], Panel | None]]:
    """Return the steps that a step with `judge.models` stands for, by name. The value of each has
    the step's keys with one model, and for the last step the panel.

    Args:
        name: the name of the step in the file.
        options: the keys of the step.
        start: the path of the key `judge`, for messages.

    Raises:
        ConfigError: the models are not a list or mapping of two or more, or the step sets keys that
            `judge.models` sets.
    """
    judge = options[JUDGE]
    models = judge[MODELS]
    if isinstance(models, list):
        models = {f"judge_{number}": model for number, model in enumerate(models, start=1)}
    if not isinstance(models, Mapping) or len(models) < 2:
        raise ConfigError(
            f"{start}.{MODELS} must name two models or more, as a list or as {{name: model}} (one: "
            "model.path)"
        )
    model_values = options.get(_MODEL, {})
    if "model.path" in options or not isinstance(model_values, Mapping) or "path" in model_values:
        raise ConfigError(f"{start}.{MODELS} names the models: leave out model.path")
    if "post" in options:
        raise ConfigError(
            f"{start}.{MODELS}: the marks of all judges are read in the same way, by their "
            "template: leave out post, and grade the judges' steps afterwards"
        )
    by_name: dict[str, tuple[dict[str, Any], Panel | None]] = {}
    steps: dict[str, str] = {}
    alone = {key: value for key, value in judge.items() if key != MODELS}
    for judge_name, model in models.items():
        if not isinstance(judge_name, str) or not _NAME.fullmatch(judge_name):
            raise ConfigError(
                f"{start}.{MODELS}: {judge_name!r:.40} is not the name of a judge: use up to 20 "
                "letters, digits and _, the first one a letter"
            )
        values = {
            **options,
            JUDGE: alone,
            _MODEL: {**model_values, **_model(model, f"{start}.{MODELS}")},
        }
        is_last = len(steps) == len(models) - 1
        panel = Panel(steps, judge_name) if is_last else None
        step = name if is_last else f"{name}_{judge_name}"
        by_name[step] = values, panel
        if not is_last:
            steps[judge_name] = step
    return by_name


def check_panel(name: str, judges: Mapping[str, SamplingConfig]) -> None:
    """Raise ConfigError for a judge that gives an answer several marks.

    Args:
        name: the step with several judges.
        judges: step of each judge → how it samples.
    """
    for judge, sampling in judges.items():
        if sampling.n > 1 or sampling.until is not None:
            key = "sampling.until" if sampling.until else f"sampling.n={sampling.n}"
            raise ConfigError(
                f"step {name}: {JUDGE}.{MODELS} takes one mark per judge and answer, but {judge} "
                f"has {key}: leave that out, or name a model several times"
            )


def _model(value: Any, start: str) -> dict[str, Any]:
    """Return the keys of the group `model` for one judge, which is given as a path or as these
    keys."""
    if isinstance(value, str):
        return {"path": value}
    if not isinstance(value, Mapping) or not {CHOICE, "path"} & value.keys():
        raise ConfigError(f"{start}: each must be the path of a model, or {{path: …, dtype: …}}")
    return dict(value)
