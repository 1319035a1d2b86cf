"""Facts about jobs that a comparison shows next to scores: settings, metrics, and when they ran.
`job_arms.py` uses them.

    config {"sampling": {"n": 4}}        →  settings {"sampling.n": "4"}
    metrics {"rows": 8, "counts": {…}}   →  numbers {"rows": 8.0, "counts.num_forwards": 90.0, …}
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from datetime import datetime
from typing import Any, NamedTuple

SEED = "sampling.seed"
_GROUPS = (
    "model", "dataset", "rows", "prompt", "sampling", "strategy", "constraint", "engine", "post",
)  # fmt: skip
"""Groups of a configuration that decide what a job computes, in their order there."""
_SLACK = 2.0
"""Seconds by which the recorded times of an attempt may be wrong."""


def is_config(config: object) -> bool:
    """Whether the content of a config.yaml consists of groups: mappings of keys to values, lists
    (`post` is one), or null for an empty group."""
    return isinstance(config, dict) and all(
        isinstance(group, dict | list | None) for group in config.values()
    )


def differing_settings(configs: Sequence[Mapping[str, Any]]) -> list[dict[str, str]]:
    """The settings in which configurations differ, for each of them: key → value as text. A
    configuration that is not known has none. A key that is missing counts as null, which `_keys`
    leaves out."""
    flat = [dict(_keys(config)) for config in configs]
    known = [settings for settings in flat if settings]
    names = list(dict.fromkeys(key for settings in known for key in settings))
    differ = [key for key in names if len({settings.get(key, "null") for settings in known}) > 1]
    return [
        {key: settings.get(key, "null") for key in differ} if settings else {} for settings in flat
    ]


def _keys(config: Mapping[str, Any]) -> Iterator[tuple[str, str]]:
    """Yield the settings of a configuration in _GROUPS, as dotted key and text."""
    for group in _GROUPS:
        for key, value in _flat(group, config.get(group)):
            if key != "model.name":  # follows from the path
                yield key, value


def _flat(key: str, value: Any) -> Iterator[tuple[str, str]]:
    """Yield the values inside a value that are not null, as dotted key and text."""
    if isinstance(value, dict) and value:
        for name, item in value.items():
            yield from _flat(f"{key}.{name}", item)
    elif value is not None:
        yield key, value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)


def job_numbers(metrics: Mapping[str, Any], config: Mapping[str, Any]) -> dict[str, float]:
    """The numbers of metrics.json and of the configuration, by their dotted keys; and the two
    numbers tokens_per_forward and tokens_per_answer, computed from others."""
    numbers = dict(_numbers("", {**config, **metrics}))
    tokens, answers = numbers.get("generated_tokens"), numbers.get("rows", 0)
    forwards = numbers.get("counts.num_forwards")
    if tokens is not None and forwards:
        numbers["tokens_per_forward"] = tokens / forwards
    if tokens is not None and answers > numbers.get("error_rows", 0):
        numbers["tokens_per_answer"] = tokens / (answers - numbers.get("error_rows", 0))
    return numbers


def _numbers(key: str, value: Any) -> Iterator[tuple[str, float]]:
    """Yield the numbers inside a value, with their dotted keys."""
    if isinstance(value, dict):
        for name, item in value.items():
            yield from _numbers(f"{key}.{name}" if key else str(name), item)
    elif isinstance(value, (int, float)) and not isinstance(value, bool):
        yield key, float(value)


class AttemptTime(NamedTuple):
    """The time in which one attempt at a job ran. Jobs whose times overlap on one machine shared
    it, so that their speeds cannot be compared.

    Attributes:
        host: the machine.
        begin, end: seconds since 1970.
    """

    host: str
    begin: float
    end: float


def attempt_times(metrics: Mapping[str, Any]) -> list[AttemptTime]:
    """The times in which the attempts at a job ran. They end _SLACK earlier than recorded, so that
    jobs that ran one after the other do not seem to overlap."""
    times = []
    for attempt in metrics.get("attempts") or ():
        try:
            began = datetime.strptime(attempt["started"], "%Y-%m-%dT%H:%M:%S%z").timestamp()
            end = began + float(attempt["wall_s"]) - _SLACK
            times.append(AttemptTime(str(attempt["host"]), began, end))
        except (LookupError, TypeError, ValueError):  # from a stranger or an older version
            continue
    return times
