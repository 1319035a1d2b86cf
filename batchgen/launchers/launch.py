"""Hands a job to the launcher that its configuration names."""

from __future__ import annotations

from importlib.util import find_spec
from pathlib import Path

from batchgen.config.job_config import JobConfig
from batchgen.config.launcher_config import (
    LocalLauncherConfig,
    RayLauncherConfig,
    SlurmLauncherConfig,
)
from batchgen.launchers.launched import Launched
from batchgen.leases.own_files import refuse_links
from batchgen.util.errors import ConfigError
from batchgen.util.paths import is_url

_PACKAGES = {"ray": "ray", "slurm": "submitit"}


def launch(config: JobConfig) -> Launched:
    """Run a job by its launcher.

    Raises:
        ConfigError: the launcher cannot run this job, or not here.
    """
    check_launcher(config)
    if not is_url(config.output.dir) and Path(config.output.dir).is_dir():
        refuse_links(Path(config.output.dir))
    if isinstance(config.launcher, RayLauncherConfig):
        from batchgen.launchers import ray_launcher

        return ray_launcher.launch(config)
    if isinstance(config.launcher, SlurmLauncherConfig):
        from batchgen.launchers import slurm

        return slurm.launch(config)
    from batchgen.launchers import local

    return local.launch(config)


def check_launcher(config: JobConfig) -> None:
    """Refuse what can be refused without a look at the machines.

    Raises:
        ConfigError: the launcher lacks its package, or the job cannot have several workers.
    """
    kind = config.launcher.kind
    if kind == "none":
        return
    if config.dataset.path == "-":
        raise ConfigError(
            f"launcher={kind}: several workers cannot read rows from standard input: write them to "
            "a file and give it as dataset.path"
        )
    package = _PACKAGES.get(kind)
    if package is not None and find_spec(package) is None:
        raise ConfigError(
            f"launcher={kind} needs the package {package}, which is not installed: "
            f"pip install 'batchgen[{kind}]'"
        )


def check_here(config: JobConfig) -> None:
    """Refuse what a command on this machine would refuse before it starts a worker.

    Raises:
        ConfigError: as of `check_launcher`; or it cannot be said how many workers run here.
    """
    check_launcher(config)
    if isinstance(config.launcher, LocalLauncherConfig):
        from batchgen.launchers import local

        local.workers_here(config)


def described(config: JobConfig) -> str | None:
    """Who runs the job, for people; None if that is the command itself."""
    launcher = config.launcher
    if isinstance(launcher, LocalLauncherConfig):
        return f"local: {_workers(launcher.workers)}"
    if isinstance(launcher, RayLauncherConfig):
        where = launcher.address or "RAY_ADDRESS, or a cluster of this machine"
        return f"ray: {_workers(launcher.workers)}, address {where}"
    if isinstance(launcher, SlurmLauncherConfig):
        asked = {
            **{"partition": launcher.partition, "account": launcher.account, "qos": launcher.qos},
            **{"constraint": launcher.constraint, "mem": launcher.mem, **launcher.parameters},
        }
        given = [f"{name}={value}" for name, value in asked.items() if value is not None]
        where = "slurm" if launcher.cluster == "slurm" else f"slurm on {launcher.cluster}"
        about = [_workers(launcher.workers), f"{launcher.minutes} minutes at a time", *given]
        return f"{where}: {', '.join(about)}"
    return None


def _workers(count: int | None) -> str:
    if count is None:
        return "a worker on each GPU"
    return f"{count} worker{'s' * (count != 1)}"
