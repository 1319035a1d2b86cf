"""Measures how much of its budget a job has used, over all workers and attempts.

`Generation` stops the job when `Spending.is_spent`; the reports and `batchgen plan` use the texts.
"""

from __future__ import annotations

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
from batchgen.storage.stores.metrics_file import read_metrics
from batchgen.util.duration import duration

Attempts = Sequence[Mapping[str, Any]]
"""Entries of `attempts` in metrics.json, of one job or of several jobs that share a budget."""


@dataclass(frozen=True)
class Used:
    """What some attempts have used.

    Attributes:
        tokens: tokens of prompts and answers of finished rows.
        seconds: the time in which at least one worker ran.
        device_seconds: the sum over all devices.
    """

    tokens: int = 0
    seconds: float = 0.0
    device_seconds: float = 0.0

    @classmethod
    def of(cls, attempts: Attempts) -> Used:
        """Add up what several attempts have used. The time of a process that computes several jobs
        at the same time counts once."""
        tokens = sum(attempt["prompt_tokens"] + attempt["generated_tokens"] for attempt in attempts)
        spans_by_process = defaultdict(list)
        for number, attempt in enumerate(attempts):
            start = datetime.strptime(attempt["started"], "%Y-%m-%dT%H:%M:%S%z").timestamp()
            # Attempts in old files have no `pid`: each of them counts as a process.
            process = attempt["host"], attempt.get("pid") or -number, attempt.get("devices", 1)
            spans_by_process[process].append((start, start + attempt["wall_s"]))
        all_spans = [span for spans in spans_by_process.values() for span in spans]
        device_seconds = sum(
            _covered(spans) * devices for (_, _, devices), spans in spans_by_process.items()
        )
        return cls(tokens, _covered(all_spans), device_seconds)

    def by_limit(self, budget: BudgetConfig) -> dict[str, float]:
        """The amounts used, by those keys of the budget that have a limit."""
        hours = self.device_seconds / 3600
        amounts = {"tokens": self.tokens, "minutes": self.seconds / 60, "gpu_hours": hours}
        if budget.price_per_hour is not None:
            amounts["price"] = hours * budget.price_per_hour
        return {key: amounts[key] for key in budget.limits}


class Spending:
    """Watches the budget of a job for one of its workers.

    The other workers' use is read from metrics.json, which the first worker writes. So a worker
    reads one file every SAVE_SECONDS, and knows the others' use about half a minute late.
    """

    def __init__(
        self,
        budget: BudgetConfig,
        metrics: Metrics,
        storage: Storage,
        elsewhere: Callable[[], Attempts] = tuple,
    ) -> None:
        """Watch the budget from now on. `elsewhere` returns the attempts of other jobs that share
        it."""
        self._budget, self._metrics, self._storage = budget, metrics, storage
        self._elsewhere = elsewhere
        self._read = Used()  # what all workers had used when metrics.json was last read
        self._read_at = -math.inf  # the time of that read
        self._read_tokens = 0  # the tokens of this worker at that time
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
        """The sentence that says which limits are reached, and how to continue the job."""
        used = self._used.by_limit(self._budget)
        reached = [key for key, limit in self._budget.limits.items() if used[key] >= limit]
        keys = " and ".join(f"budget.{key}" for key in reached)
        amounts = " and ".join(
            _spent_text(key, used[key], self._budget.limits[key]) for key in reached
        )
        return f"The budget is spent: {amounts}. A higher {keys} continues the job."

    @property
    def _used(self) -> Used:
        """What all workers had used when metrics.json was last read, and what this worker has used
        since."""
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
        """What all workers have used: this worker by its own count, the others by metrics.json."""
        attempts = (read_metrics(self._storage) or {}).get("attempts", [])
        attempt = {**asdict(self._metrics.attempt), "wall_s": self._metrics.age}
        key = attempt["worker"], attempt["started"]
        others = [other for other in attempts if (other.get("worker"), other["started"]) != key]
        return Used.of([*others, attempt, *self._elsewhere()])


def _covered(spans: Sequence[tuple[float, float]]) -> float:
    """Return the seconds that lie in at least one of the spans, each a start and an end."""
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
    """The value of `Spending.facts`, as metrics.json has it, as text for people."""
    parts = [_spent_text(key, amounts["used"], amounts["limit"]) for key, amounts in facts.items()]
    return ", ".join(parts)
