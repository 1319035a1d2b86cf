"""Drops settings of an experiment (`+experiment=NAME`) that do not fit the user's choices.

An experiment is a ready job: it chooses, for example, a strategy and sets its options. If the user
chooses another strategy, these options do not apply. They are dropped here, with a message, instead
of being refused as unknown options. `compose_config.py` calls `leave_out_others`.
"""

from __future__ import annotations

import sys
from collections.abc import Mapping
from typing import Any

from batchgen.config.groups.config_keys import EXPERIMENT, all_keys, choice_values, choices
from batchgen.config.groups.job_config import COMMON_COLUMNS
from batchgen.config.groups.named_code import named_code

_KINDS = ("prompt", "strategy", "constraint", "launcher")
"""The groups whose choices have keys that other choices refuse."""


def choices_with(column: str) -> list[str]:
    """The choices of the group strategy whose rows have the column. Their classes load torch."""
    return [choice for choice in choices("strategy") if column in _columns(choice)]


def leave_out_others(
    groups: dict[str, Any], experiment: str, chosen: Mapping[str, str], *, own_columns: bool
) -> None:
    """Drop the keys and columns of an experiment that belong to choices other than `chosen`, and
    print what was dropped to stderr.

    Keys that the user sets are added later, and refused if they do not fit.

    Args:
        groups: the experiment's settings by group, which are changed in place.
        experiment: the name of the experiment, for the message.
        chosen: group → the choice that is in use.
        own_columns: whether the user sets `output.columns`.
    """
    left_out = []
    for group in _KINDS:
        choice = chosen.get(group)
        if choice is None or choice not in choices(group):
            continue
        values, known = choice_values(group, choice), all_keys()
        for name in list(groups[group]):
            if name not in values and f"{group}.{name}" in known:
                del groups[group][name]
                left_out.append(f"{group}.{name}")
    strategy = chosen.get("strategy")
    if strategy is not None and strategy in choices("strategy") and not own_columns:
        output = groups["output"]
        columns = output.get("columns") or ()
        if unavailable := [name for name in columns if _needs_other_strategy(name, strategy)]:
            output["columns"] = [name for name in columns if name not in unavailable]
            left_out.append(f"the output.columns {', '.join(unavailable)}")
    if left_out:
        taken = " ".join(f"{group}={chosen[group]}" for group in _KINDS if group in chosen)
        print(
            f"batchgen: {taken} does not use these settings of {EXPERIMENT}={experiment}: "
            f"{', '.join(left_out)}",
            file=sys.stderr,
        )


def _needs_other_strategy(column: str, strategy: str) -> bool:
    """Whether other strategies declare a column, and this one does not."""
    if column in COMMON_COLUMNS or column in _columns(strategy):
        return False
    return bool(choices_with(column))


def _columns(strategy: str) -> list[str]:
    """The names of the columns that a choice of the group strategy declares."""
    target = choice_values("strategy", strategy)["_target_"]
    return [column.name for column in named_code(target, "strategy._target_").columns]
