"""`launcher=local`: the workers of a job as processes of this machine."""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path

from batchgen.config.job_config import JobConfig
from batchgen.config.launcher_config import LocalLauncherConfig
from batchgen.launchers.launched import Launched, LaunchedFolder
from batchgen.launchers.process import (
    Command,
    WorkerProcess,
    output_files,
    worker_arguments,
    worker_job,
)
from batchgen.launchers.supervisor import Place, Supervisor
from batchgen.util.errors import ConfigError

BEAT_SECONDS = 2.0
"""Seconds between heartbeats of workers on this machine, where one costs next to nothing."""
_DEVICES = "CUDA_VISIBLE_DEVICES"


def launch(config: JobConfig) -> Launched:
    """Run a job in several processes of this machine, to its end.

    Raises:
        ConfigError: it cannot be said how many.
    """
    count, devices = workers_here(config)
    return run_local(config, count, devices)


def workers_here(config: JobConfig) -> tuple[int, Sequence[str]]:
    """How many workers this machine has for a job, and the GPUs that they share.

    Raises:
        ConfigError: it cannot be said how many.
    """
    assert isinstance(config.launcher, LocalLauncherConfig)
    devices = [] if config.engine.device == "cpu" else visible_devices()
    ranks = config.engine.tensor_parallel
    count = config.launcher.workers or len(devices) // ranks
    if devices and len(devices) < ranks:
        raise ConfigError(
            f"engine.tensor_parallel={ranks} needs as many GPUs for each worker, and there are "
            f"{len(devices)}"
        )
    if not count:
        raise ConfigError(
            "launcher.workers has no value, and there is no GPU: say how many workers share the "
            "CPU, as in launcher.workers=2"
        )
    return count, devices


def run_local(
    config: JobConfig, count: int, devices: Sequence[str], command: Command = worker_arguments
) -> Launched:
    """Run a job in so many processes.

    Args:
        devices: the GPUs, of which the workers take `engine.tensor_parallel` each in turns; empty
            on a CPU.
        command: what they run.
    """
    assert isinstance(config.launcher, LocalLauncherConfig)
    ranks = config.engine.tensor_parallel
    with tempfile.TemporaryDirectory(prefix="batchgen-") as name:
        job = Path(name) / "job.yaml"
        job.write_text(worker_job(config, BEAT_SECONDS), encoding="utf-8")

        def start(place: Place) -> WorkerProcess:
            environment = _environment(place.number, count, devices, ranks)
            return WorkerProcess(command(job, place.number), place.output, environment)

        supervisor = Supervisor(
            LaunchedFolder(Path(config.output.dir)),
            [output_files(Path(name), number) for number in range(count)],
            start,
            restarts=config.launcher.restarts,
            title=f"{count} workers start",
        )
        return supervisor.run()


def _environment(place: int, count: int, devices: Sequence[str], ranks: int) -> dict[str, str]:
    """The variables that give a worker a device for each of its ranks, or its part of the cores."""
    if devices:
        first = place % (len(devices) // ranks) * ranks
        return {_DEVICES: ",".join(devices[first : first + ranks])}
    cores = len(os.sched_getaffinity(0))
    return {"OMP_NUM_THREADS": os.environ.get("OMP_NUM_THREADS", str(max(1, cores // count)))}


def visible_devices() -> list[str]:
    """The GPUs that a process started here would see, as CUDA_VISIBLE_DEVICES names them."""
    given = os.environ.get(_DEVICES)
    if given is not None:
        return [name.strip() for name in given.split(",") if name.strip()]
    # In a process of its own: the launcher itself needs neither torch nor a context on a GPU.
    program = "import torch; print(torch.cuda.device_count())"
    done = subprocess.run([sys.executable, "-P", "-c", program], capture_output=True, text=True)
    return [str(i) for i in range(int(done.stdout or 0))]
