"""Hands a job to the launcher that its configuration names.

`launch` is called by the command, `check_launcher` when the job is resolved.
"""

from __future__ import annotations

from importlib.util import find_spec
from pathlib import Path

from batchgen.config.groups.job_config import JobConfig
from batchgen.config.groups.launcher_config import Launched, Launcher, job_launcher
from batchgen.storage.leases.job_files import refuse_links
from batchgen.util.errors import ConfigError
from batchgen.util.paths import is_url


def launch(config: JobConfig) -> Launched:
    """Run a job by its launcher.

    Raises:
        ConfigError: the launcher cannot run this job, or cannot run on this machine.
    """
    launcher = check_launcher(config)
    assert launcher is not None
    if not is_url(config.output.dir) and Path(config.output.dir).is_dir():
        refuse_links(Path(config.output.dir))
    return launcher.launch(config)


def check_launcher(config: JobConfig, *, here: bool = False) -> Launcher | None:
    """The job's launcher; None if the job has none. With `here`, the launcher also checks this
    machine.

    Raises:
        ConfigError: the launcher's package is missing, or the job cannot have several workers.
    """
    launcher = job_launcher(config)
    if launcher is None:
        return None
    if config.dataset.path == "-":
        raise ConfigError(
            f"launcher={launcher.name}: several workers cannot read rows from standard input: "
            "write them to a file and give it as dataset.path"
        )
    if launcher.package is not None and find_spec(launcher.package) is None:
        raise ConfigError(
            f"launcher={launcher.name} needs the package {launcher.package}, which is not "
            f"installed: pip install 'batchgen[{launcher.name}]'"
        )
    if here:
        launcher.check_here(config)
    return launcher


def launcher_text(config: JobConfig) -> str | None:
    """A job's launcher in words; None if the command itself computes the rows."""
    launcher = job_launcher(config)
    return None if launcher is None else launcher.described()
