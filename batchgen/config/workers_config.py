"""The group `workers`: how the workers of a job notice each other."""

from __future__ import annotations

from dataclasses import dataclass

from batchgen.util.errors import ConfigError

_MOST_SECONDS = 7 * 86_400


@dataclass(frozen=True, slots=True, kw_only=True)
class WorkersConfig:
    """How the workers of a job notice each other; `name` is this process (`+worker=NAME`)."""

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
                f"workers.heartbeat={self.heartbeat}: else a worker would be taken for dead "
                "between two heartbeats"
            )
