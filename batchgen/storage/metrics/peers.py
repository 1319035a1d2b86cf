"""Combines the figures of several workers of one job for metrics.json."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Protocol


class Peers(Protocol):
    """One worker's access to the figures of the other workers.

    Attributes:
        number: the number of this worker.
        session: a text that is equal for workers that run at the same time.
    """

    @property
    def number(self) -> int: ...

    @property
    def session(self) -> str: ...

    def tell(self, facts: Mapping[str, Any]) -> None:
        """Report this worker's figures to the others."""
        ...

    def is_first(self) -> bool:
        """Whether this worker writes metrics.json."""
        ...

    def others(self) -> Sequence[Mapping[str, Any]]:
        """The figures that the other workers have reported; `dead` and `ended` say whether and how
        a worker has ended."""
        ...


def reported_attempt(beat: Mapping[str, Any], is_complete: bool) -> dict[str, Any] | None:
    """Another worker's attempt, from its heartbeat; None if the heartbeat has no attempt yet.

    In a complete job, workers that are still alive count as complete.
    """
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
    """Add up several `Totals`, given as plain values."""
    total: dict[str, Any] = {}
    for figures in totals:
        for name, value in figures.items():
            if isinstance(value, Mapping):
                sums = total.setdefault(name, {})
                for key, count in value.items():
                    sums[key] = sums.get(key, 0) + count
            else:
                total[name] = total.get(name, 0) + value
    return total


def seconds(attempts: Sequence[Mapping[str, Any]], key: str) -> float:
    """Add up the seconds of all attempts. Of workers that ran at the same time only the longest
    counts."""
    longest: dict[Any, float] = {}
    for number, attempt in enumerate(attempts):
        session = attempt.get("session") or number
        longest[session] = max(longest.get(session, 0.0), attempt[key])
    return round(sum(longest.values()), 3)
