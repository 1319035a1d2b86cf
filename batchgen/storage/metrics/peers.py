"""Combines the figures of several workers of one job for metrics.json."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Protocol


class Peers(Protocol):
    """One worker's access to the figures of the others. Workers that run at the same time have the
    same `session`."""

    @property
    def number(self) -> int: ...

    @property
    def session(self) -> str: ...

    def tell(self, facts: Mapping[str, Any]) -> None:
        """Report this worker's figures to the others."""
        ...

    def is_first(self) -> bool:
        """Whether this worker is the one that writes metrics.json."""
        ...

    def others(self) -> Sequence[Mapping[str, Any]]:
        """The figures that the others have reported; `dead` and `ended` say whether and how each
        has ended."""
        ...


def reported_attempt(beat: Mapping[str, Any], is_complete: bool) -> dict[str, Any] | None:
    """Another worker's attempt, from its heartbeat; None before the first one. In a complete job,
    live workers count as complete."""
    if "attempt" not in beat:
        return None
    attempt = dict(beat["attempt"])
    if attempt["status"] == "running":
        if beat["dead"]:
            attempt["status"] = beat["ended"] or "killed"
        elif is_complete:
            attempt["status"] = "complete"
    return attempt


def added(totals: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """Sums over several `Totals`, as plain values."""
    total: dict[str, Any] = {}
    for one in totals:
        for name, value in one.items():
            if isinstance(value, Mapping):
                sums = total.setdefault(name, {})
                for key, count in value.items():
                    sums[key] = sums.get(key, 0) + count
            else:
                total[name] = total.get(name, 0) + value
    return total


def seconds(attempts: Sequence[Mapping[str, Any]], key: str) -> float:
    """Seconds of all attempts: workers that ran at the same time count as their longest one."""
    longest: dict[Any, float] = {}
    for number, attempt in enumerate(attempts):
        session = attempt.get("session") or number
        longest[session] = max(longest.get(session, 0.0), attempt[key])
    return round(sum(longest.values()), 3)
