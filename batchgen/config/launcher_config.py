"""The group `launcher`: who starts the workers of a job, and where."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

from batchgen.util.errors import ConfigError


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
        _check_workers(self.workers, most=1024)
        _at_least(0, "restarts", self.restarts)


@dataclass(frozen=True, slots=True, kw_only=True)
class RayLauncherConfig:
    """Actors on the nodes of a Ray cluster.

    Attributes:
        runtime_env: what Ray prepares on each node for the actors, in Ray's own words.
    """

    kind: Literal["ray"]
    workers: int | None = None
    address: str | None = None
    gpus_per_worker: float | None = None
    cpus_per_worker: float = 1
    placement: Literal["spread", "pack"] = "spread"
    restarts: int = 3
    runtime_env: Mapping[str, Any] = field(default_factory=dict)

    def __post_init__(self) -> None:
        _check_workers(self.workers, most=100_000)
        _at_least(0, "gpus_per_worker", self.gpus_per_worker)
        _at_least(0, "cpus_per_worker", self.cpus_per_worker)
        _at_least(0, "restarts", self.restarts)
        gpus = self.gpus_per_worker
        if gpus is not None and gpus > 1 and gpus != int(gpus):
            raise ConfigError(
                f"launcher.gpus_per_worker={gpus} must be a whole number, or below 1 for workers "
                "that share a GPU"
            )


@dataclass(frozen=True, slots=True, kw_only=True)
class SlurmLauncherConfig:
    """Tasks of a Slurm job array.

    Attributes:
        minutes: that a task may run at a time; it is requeued after them.
        stop_seconds: how long before the end of these it is told to stop.
        requeues: how often it is requeued for its time. Preemptions are not counted.
        parameters: further options of sbatch by their names without dashes; True for a flag.
    """

    kind: Literal["slurm"]
    workers: int
    cluster: Literal["slurm", "local", "debug"] = "slurm"
    wait: bool = True
    partition: str | None = None
    account: str | None = None
    qos: str | None = None
    minutes: int = 240
    gpus_per_worker: int | None = None
    cpus_per_worker: int = 4
    mem: str | None = None
    constraint: str | None = None
    setup: tuple[str, ...] = ()
    stop_seconds: int = 90
    requeues: int = 100
    parameters: Mapping[str, str | int | bool] = field(default_factory=dict)

    def __post_init__(self) -> None:
        _check_workers(self.workers, most=100_000)
        _at_least(1, "minutes", self.minutes)
        _at_least(0, "gpus_per_worker", self.gpus_per_worker)
        _at_least(1, "cpus_per_worker", self.cpus_per_worker)
        _at_least(1, "stop_seconds", self.stop_seconds)
        _at_least(0, "requeues", self.requeues)
        if self.stop_seconds >= 60 * self.minutes:
            raise ConfigError(
                f"launcher.stop_seconds={self.stop_seconds} must be less than launcher.minutes="
                f"{self.minutes}: else a worker would be told to stop before it begins"
            )
        if self.cluster == "debug" and not self.wait:
            raise ConfigError(
                "launcher.wait must be true with launcher.cluster=debug, which runs the workers "
                "inside the command"
            )


def _check_workers(workers: int | None, most: int) -> None:
    if workers is not None and not 1 <= workers <= most:
        raise ConfigError(f"launcher.workers must be 1 to {most:,}, got {workers}")


def _at_least(least: int, key: str, value: float | None) -> None:
    if value is not None and value < least:
        raise ConfigError(f"launcher.{key} must be at least {least}, got {value}")


LauncherConfig = NoLauncherConfig | LocalLauncherConfig | RayLauncherConfig | SlurmLauncherConfig
LAUNCHER_KINDS: dict[str, type[LauncherConfig]] = {
    "none": NoLauncherConfig,
    "local": LocalLauncherConfig,
    "ray": RayLauncherConfig,
    "slurm": SlurmLauncherConfig,
}
