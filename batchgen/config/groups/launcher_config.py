"""The configuration group `launcher`: the interface of classes that start the workers of a job."""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass
from typing import ClassVar

from batchgen.config.groups.class_names import GONE, class_short_name
from batchgen.config.groups.job_config import JobConfig
from batchgen.config.groups.named_code import named_code, strategy_options
from batchgen.util.errors import ConfigError
from batchgen.util.paths import is_url


@dataclass(frozen=True)
class Launched:
    """How a job that a launcher ran ended.

    Attributes:
        exit_code: see `batchgen.__main__`.
        stopped_by: the number of the signal that stopped it; None if none did.
        message: the text for the user.
    """

    exit_code: int
    stopped_by: int | None
    message: str


class Launcher(ABC):
    """Starts the workers of a job. The parameters of its constructor are the keys of the group."""

    name: ClassVar[str]
    package: ClassVar[str | None] = None  # a package that it needs, in the extra `batchgen[name]`
    # Keys that run code, or decide where it runs: a stranger's file may not set them.
    running_keys: ClassVar[tuple[str, ...]] = ()

    @abstractmethod
    def launch(self, config: JobConfig) -> Launched:
        """Run a job to its end.

        Raises:
            ConfigError: it cannot run the job, or not on this machine.
        """

    @abstractmethod
    def described(self) -> str:
        """Describe the launcher and its workers for people."""

    def check_here(self, config: JobConfig) -> None:  # noqa: B027
        """Raise the ConfigError that `launch` would raise on this machine before it starts a
        worker."""


def job_launcher(config: JobConfig) -> Launcher | None:
    """The launcher of a job; None if the command itself is the worker.

    Raises:
        ConfigError: its class is not a launcher, a key is wrong, or the output is in an object
            store.
    """
    if config.launcher is None:
        return None
    target = config.launcher.target
    cls = launcher_class(target)
    launcher = cls(**strategy_options(cls, config.launcher.options, "launcher"))
    if is_url(config.output.dir):
        raise ConfigError(
            f"launcher={launcher.name} watches its workers in a folder, and output.dir="
            f"{config.output.dir} is in an object store: start the workers yourself, with the "
            "same command without launcher=, any number of times and on any machines"
        )
    return launcher


def launcher_class(target: str) -> type[Launcher]:
    """Import the class of a launcher.

    Raises:
        ConfigError: it is not a launcher.
    """
    if class_short_name(target) == GONE:
        raise ConfigError(
            "launcher=slurm was removed: let Hydra submit the workers (batchgen -m "
            "hydra/launcher=submitit_slurm +worker='range(0,16)' …), or run the command as a job "
            "array"
        )
    cls = named_code(target, "launcher._target_")
    if not (isinstance(cls, type) and issubclass(cls, Launcher)):
        raise ConfigError(f"launcher._target_: {target} is not a launcher")
    return cls


def check_workers(workers: int | None, limit: int) -> None:
    if workers is not None and not 1 <= workers <= limit:
        raise ConfigError(f"launcher.workers must be 1 to {limit:,}, got {workers}")


def at_least(minimum: int, **values: float | None) -> None:
    """Raise ConfigError for a key with a lower value."""
    for key, value in values.items():
        if value is not None and value < minimum:
            raise ConfigError(f"launcher.{key} must be at least {minimum}, got {value}")


def workers_text(count: int | None) -> str:
    """The number of workers in words."""
    if count is None:
        return "a worker on each GPU"
    return f"{count} worker{'s' * (count != 1)}"
