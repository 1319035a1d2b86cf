"""`launcher=local`: the workers of a job as processes of this machine, shared out over its GPUs."""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from batchgen.config.groups.job_config import JobConfig
from batchgen.config.groups.launcher_config import (
    Launched,
    Launcher,
    at_least,
    check_workers,
    workers_text,
)
from batchgen.engine.device.host_limits import usable_cores
from batchgen.jobs.launchers.launched import LaunchedFolder
from batchgen.jobs.launchers.process import (
    Command,
    WorkerProcess,
    output_files,
    worker_arguments,
    worker_job,
)
from batchgen.jobs.launchers.supervisor import Supervisor, WorkerSlot
from batchgen.util.errors import ConfigError

BEAT_SECONDS = 2.0
"""Seconds between heartbeats of workers on this machine, where a heartbeat costs next to
nothing."""
_DEVICES = "CUDA_VISIBLE_DEVICES"


@dataclass(frozen=True, slots=True, kw_only=True)
class LocalLauncher(Launcher):
    """The launcher `local`: worker processes on this machine; see `conf/launcher/local.yaml`."""

    name = "local"

    workers: int | None = None
    restarts: int = 3

    def __post_init__(self) -> None:
        check_workers(self.workers, limit=1024)
        at_least(0, restarts=self.restarts)

    def described(self) -> str:
        return f"local: {workers_text(self.workers)}"

    def check_here(self, config: JobConfig) -> None:
        self.workers_here(config)

    def launch(self, config: JobConfig) -> Launched:
        return self.run(config, *self.workers_here(config))

    def workers_here(self, config: JobConfig) -> tuple[int, Sequence[str]]:
        """The number of workers of a job on this machine, and the GPUs that they share.

        Raises:
            ConfigError: there are too few GPUs for one worker, or no number of workers is set for
                the CPU.
        """
        devices = [] if config.engine.device == "cpu" else visible_devices()
        ranks = config.engine.tensor_parallel
        count = self.workers or len(devices) // ranks
        if devices and len(devices) < ranks:
            raise ConfigError(
                f"engine.tensor_parallel={ranks} needs as many GPUs for each worker, and this "
                f"machine has {len(devices)}: lower it"
            )
        if not count:
            raise ConfigError(
                "launcher.workers has no value, and there is no GPU: set how many workers share "
                "the CPU, as in launcher.workers=2"
            )
        return count, devices

    def run(
        self,
        config: JobConfig,
        count: int,
        devices: Sequence[str],
        command: Command = worker_arguments,
    ) -> Launched:
        """Run a job in `count` processes of `command`.

        Each process gets `engine.tensor_parallel` of the devices; the processes share them if there
        are more processes than devices. `devices` is empty on a CPU.
        """
        ranks = config.engine.tensor_parallel
        with tempfile.TemporaryDirectory(prefix="batchgen-") as name:
            job = Path(name) / "job.yaml"
            job.write_text(worker_job(config, BEAT_SECONDS), encoding="utf-8")

            def start(slot: WorkerSlot) -> WorkerProcess:
                environment = _environment(slot.number, count, devices, ranks)
                return WorkerProcess(command(job, slot.number), slot.output, environment)

            return Supervisor(
                LaunchedFolder(Path(config.output.dir)),
                [output_files(Path(name), number) for number in range(count)],
                start,
                restarts=self.restarts,
                title=f"{count} workers start",
            ).run()


def _environment(index: int, count: int, devices: Sequence[str], ranks: int) -> dict[str, str]:
    """The environment variables that give the worker `index` a GPU for each of its ranks, or on a
    CPU its part of the cores."""
    if devices:
        first = index % (len(devices) // ranks) * ranks
        return {_DEVICES: ",".join(devices[first : first + ranks])}
    cores = usable_cores()
    return {"OMP_NUM_THREADS": os.environ.get("OMP_NUM_THREADS", str(max(1, cores // count)))}


def visible_devices() -> list[str]:
    """The GPUs that a process started here would see, named as in CUDA_VISIBLE_DEVICES."""
    value = os.environ.get(_DEVICES)
    if value is not None:
        return [name.strip() for name in value.split(",") if name.strip()]
    # Another process counts them, because the launcher itself needs neither torch nor a GPU
    # context.
    program = "import torch; print(torch.cuda.device_count())"
    done = subprocess.run([sys.executable, "-P", "-c", program], capture_output=True, text=True)
    return [str(i) for i in range(int(done.stdout or 0))]
