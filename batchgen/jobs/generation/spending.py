"""What a job has used of its budget, over all workers and attempts."""

from __future__ import annotations

import json
import math
import time
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from datetime import datetime
from typing import Any

from batchgen.config.groups.workers_config import BudgetConfig
from batchgen.storage.metrics.job_metrics import SAVE_SECONDS, Metrics
from batchgen.storage.stores.job_storage import Storage
from batchgen.util.duration import duration

Attempts = Sequence[Mapping[str, Any]]
"""Entries of `attempts` in metrics.json, of one job or of several that share a budget."""


@dataclass(frozen=True)
class Used:
    """What attempts have used: `tokens` of finished rows, `seconds` in which at least one worker
    ran, and `device_seconds` of all devices together."""

    tokens: int = 0
    seconds: float = 0.0
    device_seconds: float = 0.0

    @classmethod
    def of(cls, attempts: Attempts) -> Used:
        """What the attempts have used together. The time of a process that computes several jobs
        at once counts once."""
        tokens = sum(one["prompt_tokens"] + one["generated_tokens"] for one in attempts)
        of_process = defaultdict(list)
        for number, one in enumerate(attempts):
            start = datetime.strptime(one["started"], "%Y-%m-%dT%H:%M:%S%z").timestamp()
            # Attempts of earlier versions of batchgen do not name their process.
            process = one["host"], one.get("pid") or -number, one.get("devices", 1)
            of_process[process].append((start, start + one["wall_s"]))
        every = [span for spans in of_process.values() for span in spans]
        of_devices = sum(_covered(spans) * key[2] for key, spans in of_process.items())
        return cls(tokens, _covered(every), of_devices)

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
        elsewhere: Callable[[], Attempts] = tuple,
    ) -> None:
        """Watch from now on; `elsewhere` gives the attempts of other jobs that share the budget."""
        self._budget, self._metrics, self._storage = budget, metrics, storage
        self._elsewhere = elsewhere
        self._seen = Used()
        self._seen_at, self._seen_tokens = -math.inf, 0
        if budget.limits:
            metrics.budget = self.facts

    @property
    def is_spent(self) -> bool:
        """Whether a limit is reached."""
        limits = self._budget.limits
        if not limits:
            return False
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
            f"{amount_text(key, used[key])} of {amount_text(key, self._budget.limits[key])}"
            for key in reached
        )
        return f"The budget is spent: {amounts}. A higher {keys} goes on from there."

    @property
    def _used(self) -> Used:
        """What all have used: as of the last look, and what this worker has used since."""
        attempt, now = self._metrics.attempt, time.monotonic()
        tokens = attempt.prompt_tokens + attempt.generated_tokens
        if now - self._seen_at >= SAVE_SECONDS:
            self._seen, self._seen_at, self._seen_tokens = self._look(), now, tokens
        since = now - self._seen_at
        return Used(
            self._seen.tokens + tokens - self._seen_tokens,
            self._seen.seconds + since,
            self._seen.device_seconds + since * attempt.devices,
        )

    def _look(self) -> Used:
        content = self._storage.read(self._storage.path / "metrics.json")
        attempts = [] if content is None else json.loads(content)["attempts"]
        own = {**asdict(self._metrics.attempt), "wall_s": self._metrics.age}
        key = own["worker"], own["started"]
        others = [one for one in attempts if (one.get("worker"), one["started"]) != key]
        return Used.of([*others, own, *self._elsewhere()])


def _covered(spans: Sequence[tuple[float, float]]) -> float:
    """The seconds that lie in at least one of the spans."""
    covered, end = 0.0, -math.inf
    for start, stop in sorted(spans):
        covered += max(0.0, stop - max(start, end))
        end = max(end, stop)
    return covered


def amount_text(key: str, value: float) -> str:
    """An amount of a limit, for people."""
    if key == "minutes":
        return duration(value * 60)
    if key == "tokens":
        return f"{value:,.0f} tokens"
    return f"{value:,.4g} GPU hours" if key == "gpu_hours" else f"a price of {value:,.2f}"


def shown_facts(facts: Mapping[str, Mapping[str, float]]) -> str:
    """What metrics.json says of a budget, for people."""
    parts = [
        f"{amount_text(key, one['used'])} of {amount_text(key, one['limit'])}"
        for key, one in facts.items()
    ]
    return ", ".join(parts)
