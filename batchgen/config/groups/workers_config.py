"""The configuration groups `workers` and `budget`: how workers notice each other, and when all of
them stop. A worker is a process that runs the job's command; several can work on one job."""

from __future__ import annotations

import math
from dataclasses import dataclass

from batchgen.util.errors import ConfigError

# A week.
_MOST_SECONDS = 7 * 86_400
# The keys of `budget` that stop a job; `price_per_hour` is only the price of a device.
LIMITS = ("tokens", "minutes", "gpu_hours", "price")


@dataclass(frozen=True, slots=True, kw_only=True)
class WorkersConfig:
    """How the workers of a job notice each other. Both times are in seconds; `name` is the name of
    this process (`+worker=NAME`)."""

    heartbeat: float = 15.0
    stale_after: float = 60.0
    name: str | int | None = None

    def __post_init__(self) -> None:
        for key, seconds in (("heartbeat", self.heartbeat), ("stale_after", self.stale_after)):
            if not 0 < seconds <= _MOST_SECONDS:
                raise ConfigError(
                    f"workers.{key} must be above 0 and at most {_MOST_SECONDS:,} seconds, got "
                    f"{seconds}"
                )
        if self.stale_after < 2 * self.heartbeat:
            raise ConfigError(
                f"workers.stale_after={self.stale_after} must be at least twice "
                f"workers.heartbeat={self.heartbeat}: otherwise a worker would be considered "
                "dead between two heartbeats"
            )


@dataclass(frozen=True, slots=True, kw_only=True)
class BudgetConfig:
    """The limits of what a job may use, over all its workers and attempts; None is no limit."""

    tokens: float | None = None
    minutes: float | None = None
    gpu_hours: float | None = None
    price: float | None = None
    price_per_hour: float | None = None

    def __post_init__(self) -> None:
        for key in (*LIMITS, "price_per_hour"):
            value: float | None = getattr(self, key)
            if value is not None and not 0 < value < math.inf:
                raise ConfigError(f"budget.{key} must be null or above 0, got {value!r}")
        if self.price is not None and self.price_per_hour is None:
            raise ConfigError(
                f"budget.price={self.price:g} needs the price of one device: set "
                "budget.price_per_hour"
            )

    @property
    def limits(self) -> dict[str, float]:
        """The limits that are set, by their keys."""
        limits = {key: getattr(self, key) for key in LIMITS}
        return {key: value for key, value in limits.items() if value is not None}
