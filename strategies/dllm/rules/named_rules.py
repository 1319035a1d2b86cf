"""Makes an unmasking rule from its name and options: those of `strategy` in the configuration, or
those that a row of the input brings."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import fields
from typing import Any

from batchgen.strategies.blocks import with_whole_numbers
from batchgen.strategies.dllm.rules.entropy_bound import EntropyBound
from batchgen.strategies.dllm.rules.joint_threshold import JointThreshold
from batchgen.strategies.dllm.rules.low_confidence_dynamic import LowConfidenceDynamic
from batchgen.strategies.dllm.rules.low_confidence_static import LowConfidenceStatic
from batchgen.strategies.dllm.rules.rule import Rule
from batchgen.strategies.dllm.rules.sequential import Sequential

RULES: Mapping[str, type[Rule]] = {
    "low_confidence_dynamic": LowConfidenceDynamic,
    "low_confidence_static": LowConfidenceStatic,
    "sequential": Sequential,
    "entropy_bound": EntropyBound,
    "joint_threshold": JointThreshold,
}


def named_rule(name: str, **options: Any) -> Rule:
    """Return the rule of this name. Options that are None have the rule's own default. Raises
    ValueError for an unknown name, for an option that the rule does not have, and for a value out
    of range."""
    if name not in RULES:
        raise ValueError(f"unmasking must be {' or '.join(RULES)}, got {name!r}")
    set_options = {key: value for key, value in options.items() if value is not None}
    known = {
        rule: {field.name for field in fields(rule_class) if field.init}
        for rule, rule_class in RULES.items()
    }
    for key in set_options:
        if key not in known[name]:
            others = [rule for rule, options in known.items() if key in options]
            whose = f"it belongs to {', '.join(others)}" if others else "no rule has it"
            raise ValueError(
                f"{key} is set, but unmasking {name} has no such option ({whose}): leave it null"
            )
    return RULES[name](**set_options)


def rule_of_row(values: Mapping[str, Any]) -> Rule:
    """Return the rule that a row brings: `unmasking` and the rule's options. Raises ValueError as
    in `named_rule`, and for an option that is not a number."""
    options = with_whole_numbers(values)
    name = options.pop("unmasking", None)
    if not isinstance(name, str):
        raise ValueError(f"unmasking must be {' or '.join(RULES)}, got {name!r:.100}")
    for key, value in options.items():
        if value is not None and type(value) not in (int, float):
            raise ValueError(f"{key} must be a number, got {value!r:.100}")
    return named_rule(name, **options)
