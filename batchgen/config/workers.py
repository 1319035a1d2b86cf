"""The groups `workers` and `launcher`: how processes share a job, and who starts them."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from batchgen.errors import ConfigError


@dataclass(frozen=True, slots=True, kw_only=True)
class WorkersConfig:
    """How the workers of a job notice each other.

    Attributes:
        name: what this process is called among them (`+worker=NAME` on the command line).
    """

    heartbeat: float = 15.0
    stale_after: float = 60.0
    name: str | int | None = None

    def __post_init__(self) -> None:
        if self.heartbeat <= 0:
            raise ConfigError(f"workers.heartbeat must be above 0 seconds, got {self.heartbeat}")
        if self.stale_after < 2 * self.heartbeat:
            raise ConfigError(
                f"workers.stale_after={self.stale_after} must be at least twice "
                f"workers.heartbeat={self.heartbeat}: else a worker would be taken for dead "
                "between two heartbeats"
            )


@dataclass(frozen=True, slots=True, kw_only=True)
class NoLauncherConfig:
    """The command itself is the worker."""

    kind: Literal["none"] = "none"


@dataclass(frozen=True, slots=True, kw_only=True)
class LocalLauncherConfig:
    """Processes on this machine."""

    kind: Literal["local"]
    workers: int | None = None
    restarts: int = 3

    def __post_init__(self) -> None:
        if self.workers is not None and self.workers < 1:
            raise ConfigError(f"launcher.workers must be at least 1, got {self.workers}")
        if self.restarts < 0:
            raise ConfigError(f"launcher.restarts must be at least 0, got {self.restarts}")


LauncherConfig = NoLauncherConfig | LocalLauncherConfig
LAUNCHER_KINDS: dict[str, type[NoLauncherConfig] | type[LocalLauncherConfig]] = {
    "none": NoLauncherConfig,
    "local": LocalLauncherConfig,
}
