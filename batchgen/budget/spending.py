"""What a job has used of its budget, over all workers and attempts."""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from batchgen.config.workers_config import BudgetConfig
from batchgen.folder.job_metrics import SAVE_SECONDS, Metrics
from batchgen.folder.peers import seconds
from batchgen.storage.job_storage import Storage
from batchgen.util.duration import duration


@dataclass(frozen=True)
class Used:
    """What attempts have used: `tokens` of finished rows, `seconds` in which at least one worker
    ran, and `device_seconds` of all devices together."""

    tokens: int = 0
    seconds: float = 0.0
    device_seconds: float = 0.0

    def __add__(self, other: Used) -> Used:
        return Used(
            self.tokens + other.tokens,
            self.seconds + other.seconds,
            self.device_seconds + other.device_seconds,
        )

    @classmethod
    def of(cls, attempts: Sequence[Mapping[str, Any]], devices: int) -> Used:
        """What the attempts in a metrics.json have used, each with so many devices."""
        tokens = sum(one["prompt_tokens"] + one["generated_tokens"] for one in attempts)
        wall = sum(one["wall_s"] for one in attempts)
        return cls(tokens, seconds(attempts, "wall_s"), wall * devices)

    def by_limit(self, budget: BudgetConfig) -> dict[str, float]:
        """The amounts that the limits of a budget are about, by their keys."""
        hours = self.device_seconds / 3600
        found = {"tokens": self.tokens, "minutes": self.seconds / 60, "gpu_hours": hours}
        if budget.price_per_hour is not None:
            found["price"] = hours * budget.price_per_hour
        return {key: found[key] for key in budget.limits}


class Spending:
    """Watches the budget of a job for one of its workers.

    What the others have used is read from metrics.json, which the first worker writes: so each of
    them reads one file every SAVE_SECONDS, and sees what another one used about half a minute late.
    """

    def __init__(
        self,
        budget: BudgetConfig,
        metrics: Metrics,
        storage: Storage,
        devices: int,
        elsewhere: Callable[[], Used] = Used,
    ) -> None:
        """Watch from now on. A worker has so many `devices`; `elsewhere` is what other jobs have
        used that share the budget."""
        self._budget, self._metrics, self._storage = budget, metrics, storage
        self._devices, self._elsewhere = devices, elsewhere
        self._others = Used()
        self._beside = 0.0  # the longest of the workers beside this one, in seconds
        self._next_look = 0.0
        if budget.limits:
            metrics.budget = self.facts

    @property
    def is_spent(self) -> bool:
        """Whether a limit is reached."""
        limits = self._budget.limits
        if not limits:
            return False
        if time.monotonic() >= self._next_look:
            self._look()
        used = self._used.by_limit(self._budget)
        return any(used[key] >= limit for key, limit in limits.items())

    def facts(self) -> dict[str, dict[str, float]]:
        """What is used and what the limit is, by the keys of the budget."""
        used = self._used.by_limit(self._budget)
        return {
            key: {"used": round(used[key], 4), "limit": limit}
            for key, limit in self._budget.limits.items()
        }

    def text(self) -> str:
        """Which limits are reached, and how to go on."""
        used = self._used.by_limit(self._budget)
        reached = [key for key, limit in self._budget.limits.items() if used[key] >= limit]
        keys = " and ".join(f"budget.{key}" for key in reached)
        amounts = " and ".join(
            f"{shown(key, used[key])} of {shown(key, self._budget.limits[key])}" for key in reached
        )
        return f"The budget is spent: {amounts}. A higher {keys} goes on from there."

    @property
    def _used(self) -> Used:
        """What all have used, with this worker as it is now."""
        attempt, age = self._metrics.attempt, self._metrics.age
        own = Used(
            attempt.prompt_tokens + attempt.generated_tokens,
            max(0.0, age - self._beside),
            age * self._devices,
        )
        return self._others + own

    def _look(self) -> None:
        self._next_look = time.monotonic() + SAVE_SECONDS
        content = self._storage.read(self._storage.path / "metrics.json")
        attempts = [] if content is None else json.loads(content)["attempts"]
        own = self._metrics.attempt
        key = own.worker, own.started
        others = [one for one in attempts if (one.get("worker"), one["started"]) != key]
        self._others = Used.of(others, self._devices) + self._elsewhere()
        beside = [one["wall_s"] for one in others if one.get("session") == own.session]
        self._beside = max(beside, default=0.0)


def shown(key: str, value: float) -> str:
    """An amount of a limit, for people."""
    if key == "minutes":
        return duration(value * 60)
    if key == "tokens":
        return f"{value:,.0f} tokens"
    return f"{value:,.4g} GPU hours" if key == "gpu_hours" else f"a price of {value:,.2f}"


def shown_facts(facts: Mapping[str, Mapping[str, float]]) -> str:
    """What metrics.json says of a budget, for people."""
    parts = [
        f"{shown(key, one['used'])} of {shown(key, one['limit'])}" for key, one in facts.items()
    ]
    return ", ".join(parts)
