"""`launcher=ray`: runs the workers of a job on the nodes of a Ray cluster.

Each worker is a child process of an actor, so its exit code, signals and crashes are those of a
normal process. Each actor has one bundle of a placement group. A bundle lies on one node, so all
GPUs of a worker are on one node. When a node dies, Ray looks for another node for its bundles, and
new actors wait until there is one. The workers divide the rows between them through the job's
folder, not through Ray.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

from batchgen.config.groups.job_config import JobConfig
from batchgen.config.groups.launcher_config import (
    Launched,
    Launcher,
    at_least,
    check_workers,
    workers_text,
)
from batchgen.jobs.launchers.launched import COMPLETE, LaunchedFolder, make_logs, remove_logs
from batchgen.jobs.launchers.local import BEAT_SECONDS
from batchgen.jobs.launchers.process import Command, output_files, worker_arguments, worker_job
from batchgen.jobs.launchers.supervisor import Supervisor, WorkerSlot
from batchgen.util.errors import ConfigError

_PATIENCE_SECONDS = 60.0
"""How long the launcher waits for workers that were asked to stop, before it kills them."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RayLauncher(Launcher):
    """The launcher `ray`: workers in actors of a Ray cluster; see `conf/launcher/ray.yaml`.

    Attributes:
        workers: the number of workers; None for as many as fit the cluster.
        address: the address of the cluster; None for RAY_ADDRESS, or a new cluster on this machine.
        gpus_per_worker: None for as many as the engine needs.
        cpus_per_worker: the CPUs that Ray reserves for a worker.
        placement: whether workers are spread over nodes or packed on few.
        restarts: how often a worker that crashed is started again.
        runtime_env: Ray's runtime environment.
    """

    name = "ray"
    package = "ray"
    running_keys = ("runtime_env", "address")

    workers: int | None = None
    address: str | None = None
    gpus_per_worker: float | None = None
    cpus_per_worker: float = 1
    placement: Literal["spread", "pack"] = "spread"
    restarts: int = 3
    runtime_env: Mapping[str, Any] = field(default_factory=dict)

    def __post_init__(self) -> None:
        check_workers(self.workers, limit=100_000)
        gpus = self.gpus_per_worker
        at_least(
            0, gpus_per_worker=gpus, cpus_per_worker=self.cpus_per_worker, restarts=self.restarts
        )
        if gpus is not None and gpus > 1 and gpus != int(gpus):
            raise ConfigError(
                f"launcher.gpus_per_worker={gpus} must be a whole number, or below 1 for workers "
                "that share a GPU"
            )

    def described(self) -> str:
        where = self.address or "RAY_ADDRESS, or a cluster of this machine"
        return f"ray: {workers_text(self.workers)}, address {where}"

    def worker_need(self, config: JobConfig, has_gpus: bool) -> dict[str, float]:
        """Return the resources of a node that one worker takes, by Ray's names. `has_gpus` says
        whether the cluster has GPUs."""
        gpus = self.gpus_per_worker
        if gpus is None:
            gpus = float(has_gpus and config.engine.device != "cpu") * config.engine.tensor_parallel
        need = {"GPU": gpus, "CPU": self.cpus_per_worker}
        return {name: number for name, number in need.items() if number}

    def launch(self, config: JobConfig, command: Command = worker_arguments) -> Launched:
        """Run a job on the cluster to its end, and return how it ended. `command` makes the
        arguments of each worker's Python interpreter."""
        from batchgen.jobs.launchers.ray_actor import ActorJob, ActorProcess
        from batchgen.jobs.launchers.ray_cluster import (
            Heart,
            cluster,
            count_workers,
            living_nodes,
            places,
        )

        with cluster(self.address, self.runtime_env):
            nodes, has_gpus = living_nodes()
            need = self.worker_need(config, has_gpus)
            count = count_workers(self.workers, nodes, need)
            logs = make_logs(Path(config.output.dir), "ray")
            text = worker_job(config, BEAT_SECONDS if len(nodes) == 1 else config.workers.heartbeat)
            file = logs / "job.yaml"
            file.write_text(text, encoding="utf-8")
            # Workers start in this process's folder, unless Ray's runtime environment sets another.
            folder = None if "working_dir" in self.runtime_env else os.getcwd()
            heart = Heart()  # notices when the cluster's head has died, since calls to Ray do not
            with places(count, need, self.placement.upper(), heart) as options:

                def start(slot: WorkerSlot) -> ActorProcess:
                    arguments = command(file, slot.number)
                    job = ActorJob(file, text, folder, arguments, slot.output)
                    number = slot.number
                    return ActorProcess(job, options(number), heart, is_first=not slot.starts)

                nodes_text = f"{len(nodes)} node{'s' * (len(nodes) != 1)} of Ray"
                result = Supervisor(
                    LaunchedFolder(Path(config.output.dir)),
                    [output_files(logs, number) for number in range(count)],
                    start,
                    restarts=self.restarts,
                    title=f"{count} workers start on {nodes_text}",
                    patience=_PATIENCE_SECONDS,
                ).run()
        if result.exit_code in COMPLETE:
            remove_logs(logs)
        return result
