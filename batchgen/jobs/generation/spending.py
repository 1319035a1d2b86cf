"""Tracks how much of its budget a job has used, over all workers and attempts."""

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
    """The use of some attempts: `tokens` of finished rows, `seconds` in which at least one worker
    ran, and `device_seconds` of all devices together."""

    tokens: int = 0
    seconds: float = 0.0
    device_seconds: float = 0.0

    @classmethod
    def of(cls, attempts: Attempts) -> Used:
        """The use of several attempts together. The time of a process that computes several jobs at
        once counts once."""
        tokens = sum(one["prompt_tokens"] + one["generated_tokens"] for one in attempts)
        spans_by_process = defaultdict(list)
        for number, attempt in enumerate(attempts):
            start = datetime.strptime(attempt["started"], "%Y-%m-%dT%H:%M:%S%z").timestamp()
            # Attempts of earlier versions of batchgen do not name their process: each counts as
            # one of its own.
            process = attempt["host"], attempt.get("pid") or -number, attempt.get("devices", 1)
            spans_by_process[process].append((start, start + attempt["wall_s"]))
        all_spans = [span for spans in spans_by_process.values() for span in spans]
        device_seconds = sum(
            _covered(spans) * devices for (_, _, devices), spans in spans_by_process.items()
        )
        return cls(tokens, _covered(all_spans), device_seconds)

    def by_limit(self, budget: BudgetConfig) -> dict[str, float]:
        """The amounts that are limited, by the keys of the budget that limit them."""
        hours = self.device_seconds / 3600
        amounts = {"tokens": self.tokens, "minutes": self.seconds / 60, "gpu_hours": hours}
        if budget.price_per_hour is not None:
            amounts["price"] = hours * budget.price_per_hour
        return {key: amounts[key] for key in budget.limits}


class Spending:
    """Watches the budget of a job for one of its workers.

    The use of other workers is read from metrics.json, which the first worker writes. So a worker
    reads one file every SAVE_SECONDS, and knows the others' use about half a minute late.
    """

    def __init__(
        self,
        budget: BudgetConfig,
        metrics: Metrics,
        storage: Storage,
        elsewhere: Callable[[], Attempts] = tuple,
    ) -> None:
        """Watch from now on; `elsewhere` returns the attempts of other jobs that share the
        budget."""
        self._budget, self._metrics, self._storage = budget, metrics, storage
        self._elsewhere = elsewhere
        self._read = Used()  # what all workers had used when metrics.json was last read
        self._read_at, self._read_tokens = (
            -math.inf,
            0,
        )  # the time of that; this worker's tokens at that time
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
        """The use and the limit, by the keys of the budget."""
        used = self._used.by_limit(self._budget)
        return {
            key: {"used": round(used[key], 4), "limit": limit}
            for key, limit in self._budget.limits.items()
        }

    def text(self) -> str:
        """The sentence that says which limits are reached, and how to go on."""
        used = self._used.by_limit(self._budget)
        reached = [key for key, limit in self._budget.limits.items() if used[key] >= limit]
        keys = " and ".join(f"budget.{key}" for key in reached)
        amounts = " and ".join(
            _spent_text(key, used[key], self._budget.limits[key]) for key in reached
        )
        return f"The budget is spent: {amounts}. A higher {keys} continues the job."

    @property
    def _used(self) -> Used:
        """The use of all workers when metrics.json was last read, and of this worker since."""
        attempt, now = self._metrics.attempt, time.monotonic()
        tokens = attempt.prompt_tokens + attempt.generated_tokens
        if now - self._read_at >= SAVE_SECONDS:
            self._read, self._read_at, self._read_tokens = self._read_all(), now, tokens
        since = now - self._read_at
        return Used(
            self._read.tokens + tokens - self._read_tokens,
            self._read.seconds + since,
            self._read.device_seconds + since * attempt.devices,
        )

    def _read_all(self) -> Used:
        """The use of all workers: this one by its own count, others by metrics.json."""
        content = self._storage.read(self._storage.path / "metrics.json")
        attempts = [] if content is None else json.loads(content)["attempts"]
        attempt = {**asdict(self._metrics.attempt), "wall_s": self._metrics.age}
        key = attempt["worker"], attempt["started"]
        others = [other for other in attempts if (other.get("worker"), other["started"]) != key]
        return Used.of([*others, attempt, *self._elsewhere()])


def _covered(spans: Sequence[tuple[float, float]]) -> float:
    """The seconds that lie in at least one of the spans."""
    covered, end = 0.0, -math.inf
    for start, stop in sorted(spans):
        covered += max(0.0, stop - max(start, end))
        end = max(end, stop)
    return covered


def amount_text(key: str, value: float) -> str:
    """The amount of a key of the budget as text for people, as "2 h" or "1,000 tokens"."""
    if key == "minutes":
        return duration(value * 60)
    if key == "tokens":
        return f"{value:,.0f} tokens"
    return f"{value:,.4g} GPU hours" if key == "gpu_hours" else f"a price of {value:,.2f}"


def _spent_text(key: str, used: float, limit: float) -> str:
    """How much of a limit is used, as "1,000 of 2,000 tokens" or "price 3.10 of 5.00"."""
    if key == "price":
        return f"price {used:,.2f} of {limit:,.2f}"
    return f"{amount_text(key, used).removesuffix(' tokens')} of {amount_text(key, limit)}"


def shown_facts(facts: Mapping[str, Mapping[str, float]]) -> str:
    """`Spending.facts`, as metrics.json has them, as text for people."""
    parts = [_spent_text(key, amounts["used"], amounts["limit"]) for key, amounts in facts.items()]
    return ", ".join(parts)
