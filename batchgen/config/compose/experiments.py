"""Drops those settings of a ready job (`+experiment=NAME`) that do not fit the user's own choices.

A ready job chooses, for example, a strategy and sets its options. If the user chooses another
strategy, the ready job's options belong to a strategy that is not in use. They are dropped here,
with a message, instead of being refused as unknown options.
"""

from __future__ import annotations

import sys
from collections.abc import Mapping
from typing import Any

from batchgen.config.groups.config_keys import EXPERIMENT, all_keys, choice_values, choices
from batchgen.config.groups.job_config import COMMON_COLUMNS
from batchgen.config.groups.named_code import named_code

_KINDS = ("prompt", "strategy", "constraint", "launcher")
"""The groups whose choices have keys that the others refuse."""


def choices_with(column: str) -> list[str]:
    """The choices of the group strategy whose rows have the column. Their classes load torch."""
    return [choice for choice in choices("strategy") if column in _columns(choice)]


def leave_out_others(
    groups: dict[str, Any], experiment: str, chosen: Mapping[str, str], *, own_columns: bool
) -> None:
    """Drop from a ready job's keys and columns those that belong to other choices than `chosen`,
    and say so on stderr.

    What the user gives himself is set later, and refused where it does not fit.

    Args:
        groups: the ready job's settings by group, which are changed in place.
        experiment: the name of the ready job, for the message.
        chosen: by group, the choice that is in use.
        own_columns: whether the user gives `output.columns` himself.
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
        if of_others := [name for name in columns if _is_of_others(name, strategy)]:
            output["columns"] = [name for name in columns if name not in of_others]
            left_out.append(f"the output.columns {', '.join(of_others)}")
    if left_out:
        taken = " ".join(f"{group}={chosen[group]}" for group in _KINDS if group in chosen)
        print(
            f"batchgen: {taken} does not use these settings of {EXPERIMENT}={experiment}: "
            f"{', '.join(left_out)}",
            file=sys.stderr,
        )


def _is_of_others(column: str, strategy: str) -> bool:
    """Whether a column comes with other strategies, and not with this choice."""
    if column in COMMON_COLUMNS or column in _columns(strategy):
        return False
    return bool(choices_with(column))


def _columns(strategy: str) -> list[str]:
    """The names of the columns that a choice of the group strategy declares."""
    target = choice_values("strategy", strategy)["_target_"]
    return [column.name for column in named_code(target, "strategy._target_").columns]
