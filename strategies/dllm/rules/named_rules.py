"""The unmasking rules by name, and a rule made of the options of `strategy`."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import fields
from typing import Any

from batchgen.strategies.dllm.rules.entropy_bound import EntropyBound
from batchgen.strategies.dllm.rules.joint_threshold import JointThreshold
from batchgen.strategies.dllm.rules.low_confidence_dynamic import LowConfidenceDynamic
from batchgen.strategies.dllm.rules.low_confidence_static import LowConfidenceStatic
from batchgen.strategies.dllm.rules.rule import Rule
from batchgen.strategies.dllm.rules.sequential import Sequential

RULES: Mapping[str, type[Rule]] = {
    rule.name: rule
    for rule in (
        LowConfidenceDynamic,
        LowConfidenceStatic,
        Sequential,
        EntropyBound,
        JointThreshold,
    )
}


def named_rule(name: str, **options: Any) -> Rule:
    """Make the rule of this name. Options that are None are the rule's own default. Raises
    ValueError for a name that is none, for an option that the rule does not have, and for a value
    that it does not allow."""
    if name not in RULES:
        raise ValueError(f"unmasking must be {' or '.join(RULES)}, got {name!r}")
    given = {key: value for key, value in options.items() if value is not None}
    known = {field.name for field in fields(RULES[name])}
    for key in given:
        if key not in known:
            others = [rule for rule, made in RULES.items() if key in made.__dataclass_fields__]
            raise ValueError(
                f"{key} is set, but unmasking {name} has no such option (it is of "
                f"{', '.join(others)}): leave it null"
            )
    return RULES[name](**given)
